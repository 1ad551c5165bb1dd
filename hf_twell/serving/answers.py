"""From a request to the model, and from its tokens to an answer: by Transformers' handlers of OpenAI's requests."""

import copy
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.utils import get_response_template

from hf_twell.measure.inference import check_ids, context_limit
from hf_twell.serving.one_model import Answer
from hf_twell.serving.requests import BadRequest, ChatRequest, CompletionRequest, Request

if TYPE_CHECKING:  # what the mixin is put before
    from transformers.cli.serving.completion import CompletionHandler as Handler
else:
    Handler = object

USUAL_CHARACTERS = 8  # of a token of most texts, at most
PART_CHARACTERS = 1 << 16
NEW_TOKENS = 1024  # of an answer, unless the request or the checkpoint asks for more
NO_TOKEN = -1  # for None `generate` takes the checkpoint's
COLDEST = 1e-5  # a temperature below it makes infinities of scores; there the best token is taken, as near 0


class Served:
    """A model, and what of it bounds requests.

    Attributes:
        context: how many tokens it takes, or None where its config says nothing.
        vocabulary: how many tokens it scores.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self.model, self.tokenizer = name, model, tokenizer
        self.context = context_limit(model)
        self.vocabulary: int = model.config.get_text_config().vocab_size
        self._longest = max(map(len, tokenizer.get_vocab()))  # characters of a token
        self._special = {
            str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }

    def inputs(self, prompt: str, **options: Any) -> dict[str, Any]:
        """The tokens that `generate` goes on from.

        Raises:
            BadRequest: no token, one that the model has no embedding for, or so many that no room is left for an
                answer. On a GPU, positions past the context would end the whole process.
        """
        context = self.context
        if context is not None and self._is_far_too_long(prompt, context):
            raise BadRequest(
                f"the prompt has {len(prompt):,} characters, more than the model's context of {context:,} tokens has "
                "room for; give a shorter one"
            )
        inputs = self.tokenizer(prompt, return_tensors="pt", **options)
        tokens = inputs["input_ids"].shape[-1]
        if tokens == 0:
            raise BadRequest("the prompt is empty; give at least one token")
        if context is not None and tokens >= context:
            raise BadRequest(
                f"the prompt has {tokens:,} tokens and the model's context {context:,}; leave room for an answer"
            )
        try:
            check_ids(self.model, self.tokenizer, inputs["input_ids"])
        except ValueError as error:
            raise BadRequest(str(error)) from None
        return dict(inputs.to(self.model.device))

    def _is_far_too_long(self, prompt: str, context: int) -> bool:
        """Whether a part of the prompt is more than the context, so that the rest need not become tokens.

        Text of more characters than usual for the context is counted part by part. What is cut between two parts may
        have been one token, so each cut counts less by the characters that a token has at most.
        """
        if len(prompt) <= USUAL_CHARACTERS * context:
            return False
        tokens = 0
        for start in range(0, len(prompt), PART_CHARACTERS):
            part = self.tokenizer(prompt[start : start + PART_CHARACTERS], add_special_tokens=False, verbose=False)
            tokens += len(part["input_ids"]) - self._longest
            if tokens > context:
                return True
        return False

    def generation_config(self, request: Request, prompt_tokens: int) -> GenerationConfig:
        """The checkpoint's own, but for what the request says and what fits into the context."""
        config = copy.deepcopy(self.model.generation_config)
        config.num_beams = config.num_return_sequences = 1  # an answer is sent as it is written
        config.max_new_tokens = max(config.max_new_tokens or 0, NEW_TOKENS)
        if request.generation_config is not None:
            for name, value in request.generation_config.settings().items():
                setattr(config, name, value)
        if request.limit is not None:
            config.max_new_tokens = request.limit
        if self.context is not None:
            config.max_new_tokens = min(config.max_new_tokens, self.context - prompt_tokens)
        temperature, top_p = request.temperature, request.top_p
        if top_p is not None:
            config.top_p = top_p
            config.do_sample = config.do_sample or top_p < 1  # a top_p of 1 asks for none
        if temperature is not None:
            config.do_sample = temperature >= COLDEST
            config.temperature = temperature if config.do_sample else None
        if request.logit_bias:
            config.sequence_bias = {(token,): bias for token, bias in request.logit_bias.items()}
        own = config.eos_token_id
        ends = [] if own is None or request.ignore_eos else [own] if isinstance(own, int) else list(own)
        ends += [self._special[stop] for stop in request.stop if stop in self._special]  # whose text is left out
        config.eos_token_id = ends or NO_TOKEN
        config.pad_token_id = config.pad_token_id or 0  # which nothing shows, and `generate` would warn without
        return config


class _Answering(Handler):
    """What both handlers do for one request."""

    def __init__(self, served: Served, answer: Answer) -> None:
        super().__init__(None, None)  # they get their model below, and not from a manager of several
        self._served, self._answer = served, answer

    def events(self, request: Request, prompt: tuple[dict[str, Any], dict[str, Any]]) -> AsyncGenerator[str, None]:
        """The events of the answer as a stream, which the model begins now.

        Args:
            prompt: what `prompt` made of the request. It takes a long one a second, in which others are answered.
        """
        served = self._served
        inputs, options = prompt
        config = served.generation_config(request, inputs["input_ids"].shape[-1])
        identity = f"{self.prefix}-{uuid.uuid4().hex}"
        model, tokenizer = served.model, served.tokenizer
        return self._streaming(
            identity, model, tokenizer, served.name, inputs, config, gen_manager=self._answer, **options
        ).body_iterator

    async def whole(self, events: AsyncIterator[str]) -> dict[str, Any]:
        """The answer in one piece, as a stream would be put together."""
        chunks = [
            json.loads(event.removeprefix("data: ")) async for some in events for event in some.split("\n\n")[:-1]
        ]
        return self._put_together(chunks)

    def _build_chunk_sse(self, *args, finish_reason: str | None = None, **options) -> str:
        if finish_reason in ("stop", "length"):  # which they tell by the number of tokens alone
            finish_reason = self._answer.finish_reason
        return super()._build_chunk_sse(*args, finish_reason=finish_reason, **options)


class Completion(_Answering, CompletionHandler):
    asked, prefix = CompletionRequest, "cmpl"

    def prompt(self, request: CompletionRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._served.inputs(request.prompt), {}

    def _put_together(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        last = chunks[-1]
        (choice,) = last["choices"]
        return {**last, "choices": [{**choice, "text": "".join(chunk["choices"][0]["text"] for chunk in chunks)}]}


class Chat(_Answering, ChatCompletionHandler):
    asked, prefix = ChatRequest, "chatcmpl"

    def prompt(self, request: ChatRequest) -> tuple[dict[str, Any], dict[str, Any]]:
        tokenizer = self._served.tokenizer
        if tokenizer.chat_template is None:
            raise BadRequest(f"the tokenizer of {self._served.name} has no chat template; use /v1/completions")
        tools = [tool.model_dump(exclude_unset=True) for tool in request.tools or ()] or None
        try:
            prompt = tokenizer.apply_chat_template(
                [message.for_template() for message in request.messages],
                tools=tools,
                add_generation_prompt=True,
                tokenize=False,
                **(request.chat_template_kwargs or {}),
            )
        except Exception as error:  # whatever a template does with values that it does not expect
            own = type(error) is TemplateError  # the template's own refusal
            why = str(error) if own else f"messages: the model's chat template cannot write them: {error}"
            raise BadRequest(why) from None
        return self._served.inputs(prompt, add_special_tokens=False), {"tools": tools}

    def _put_together(self, chunks: list[dict[str, Any]]) -> dict[str, Any]:
        (choice,) = chunks[-1]["choices"]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        message: dict[str, Any] = {"role": "assistant"}
        is_parsed = get_response_template(self._served.tokenizer, self._served.model) is not None
        for field in ("content", "reasoning_content"):
            text = "".join(delta.get(field, "") for delta in deltas)
            message[field] = text.strip() if is_parsed else text
        if not message["reasoning_content"]:
            del message["reasoning_content"]
        if calls := [call for delta in deltas for call in delta.get("tool_calls", ())]:
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        choice = {"index": 0, "message": message, "finish_reason": choice["finish_reason"]}
        return {**chunks[-1], "object": "chat.completion", "choices": [choice]}
