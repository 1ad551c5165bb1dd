"""One model behind OpenAI's API, by Transformers' own handlers of its requests.

Where these would give another answer than was asked for, without a word, they are mended here. Transformers' own
application also loads whichever model a client names, so the routes are ours.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, NoReturn

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseHandler, GenerationState, Modality

from hf_twell.measure.inference import check_ids, context_limit

COLDEST = 1e-5  # a temperature below it makes infinities of scores; there the best token is taken, as near 0
# Of the fields that Transformers ignores: those that no answer would heed, and what asks for nothing in the others.
HARMLESS = {"metadata", "prediction", "service_tier", "store", "stream_options", "user"}
NOTHING = {"n": 1, "best_of": 1, "modalities": ["text"], "parallel_tool_calls": True, "tool_choice": "auto"}
NOTHING["response_format"] = {"type": "text"}
TEXT = {"text", "input_text", "output_text"}  # kinds of a message's parts


def build_app(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> FastAPI:
    """The application that answers as `name`."""
    parts = _OneModel(name, model, tokenizer), GenerationState()
    chat, completion = _Chat(*parts), _Completion(*parts)

    async def tell(_, error: Exception) -> JSONResponse:
        """In OpenAI's form, which its clients read. A chat template refuses by a TemplateError."""
        refused = isinstance(error, ValueError | TemplateError)
        status, message = (400, str(error)) if refused else (500, repr(error))
        if isinstance(error, HTTPException):
            status, message = error.status_code, error.detail
        return JSONResponse({"error": {"message": message, "code": status}}, status)

    told = (ValueError, TemplateError, HTTPException, Exception)
    app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(told, tell))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: dict):
        return await chat.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}")

    @app.post("/v1/completions")
    async def completions(body: dict):
        return await completion.handle_request(body, f"cmpl-{uuid.uuid4().hex}")

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "hf_twell"}]}

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    return app


def stop_answers(model: PreTrainedModel) -> None:
    """End what is being generated and what waits for it; clients are told why."""

    def refuse(*_) -> NoReturn:
        raise HTTPException(503, "the server was stopped")

    model.register_forward_pre_hook(refuse)


class _OneModel(ModelManager):
    """Of a model that is loaded already."""

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.force_model, self._loaded = name, (model, tokenizer)

    def process_model_name(self, model_id: str) -> str:
        return model_id

    def load_model_and_processor(self, *_, **__) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        return self._loaded


class _Mended(BaseHandler):
    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        for field in sorted(self._unused_fields & body.keys() - HARMLESS):
            if body[field] and body[field] != NOTHING.get(field):
                raise ValueError(f"{field}={json.dumps(body[field])} is not supported; leave {field} out")

    def _build_generation_config(self, body: dict, *args, **options) -> GenerationConfig:
        config = super()._build_generation_config(body, *args, **options)
        if body.get("temperature") is not None:
            config.do_sample = config.temperature >= COLDEST
        elif body.get("top_p") is not None:
            config.do_sample = config.do_sample or config.top_p < 1
        if body.get("logit_bias"):
            config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        stops = config.stop_strings or None
        config.stop_strings = [stops] if isinstance(stops, str) else stops
        return config

    def _streaming(self, request_id, model, processor, model_id, inputs, gen_config, *args, **options):
        _fit(model, processor, inputs, gen_config)
        response = super()._streaming(request_id, model, processor, model_id, inputs, gen_config, *args, **options)
        response.body_iterator = _ended(response.body_iterator, gen_config.stop_strings)
        return response

    async def _non_streaming(self, request_id, model, processor, model_id, inputs, gen_config, *args, **options):
        _fit(model, processor, inputs, gen_config)
        response = await super()._non_streaming(
            request_id, model, processor, model_id, inputs, gen_config, *args, **options
        )
        if not gen_config.stop_strings:
            return response
        told = json.loads(response.body)
        part, key = _text_of(told["choices"][0])
        part[key] = part[key][: _end(part[key], gen_config.stop_strings)]
        return JSONResponse(told)


class _Chat(_Mended, ChatCompletionHandler):
    def get_processor_inputs_from_messages(self, messages: list[dict], modality: Modality) -> list[dict]:
        contents = (message.get("content") for message in messages)
        kinds = {part["type"] for content in contents if isinstance(content, list) for part in content}
        if others := kinds - TEXT:
            raise ValueError(
                f"messages hold {', '.join(sorted(others))}, and the server reads text alone; leave that out"
            )
        return super().get_processor_inputs_from_messages(messages, modality)


class _Completion(_Mended, CompletionHandler):
    pass


def _fit(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, inputs: dict, config: GenerationConfig) -> None:
    """Have an answer end where the context is full. A ValueError where the prompt leaves no room, or has a token that
    the model has no embedding for, which on a GPU ends the process."""
    check_ids(model, tokenizer, inputs["input_ids"])
    tokens, context = inputs["input_ids"].shape[-1], context_limit(model)
    if context is None:
        return
    if tokens >= context:
        raise ValueError(
            f"the prompt has {tokens:,} tokens and the model's context {context:,}; leave room for an answer"
        )
    room = context - tokens
    config.max_new_tokens = room if config.max_new_tokens is None else min(config.max_new_tokens, room)


async def _ended(events: AsyncGenerator[str, None], stops: Sequence[str] | None) -> AsyncIterator[str]:
    """A stream whose text ends before the first stop sequence, with the last event that OpenAI's streams have."""
    text, sent = "", 0
    held = max(map(len, stops or ()), default=1) - 1  # characters that may begin a stop sequence
    async with contextlib.aclosing(events):
        async for several in events:
            for event in several.removesuffix("\n\n").split("\n\n"):
                if stops and '"choices"' in event:  # else an error
                    chunk = json.loads(event.removeprefix("data: "))
                    (choice,) = chunk["choices"]
                    part, key = _text_of(choice)
                    text += part.get(key, "")
                    end = _end(text, stops)
                    if end == len(text) and "finish_reason" not in choice:
                        end = max(sent, end - held)
                    part[key], sent = text[sent:end], end
                    event = f"data: {json.dumps(chunk)}"
                yield f"{event}\n\n"
    yield "data: [DONE]\n\n"


def _text_of(choice: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What holds the text of a choice, and under which key."""
    return (choice, "text") if "text" in choice else (choice["delta" if "delta" in choice else "message"], "content")


def _end(text: str, stops: Sequence[str]) -> int:
    """Where the first stop sequence begins, or the text ends."""
    return min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))
