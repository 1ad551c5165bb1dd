"""What a client may ask for: the fields of OpenAI's requests, each with what it may be.

A field is here if the answer heeds it, or if it does not bear on the answer. A field that would call for another answer
than the server gives may hold what asks for nothing, as clients fill in; anything else in it is refused.
"""

import inspect
import json
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Json,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from transformers import PreTrainedTokenizerBase

MAX_SHOWN = 100  # characters of what a client gave, in a message
MAX_STOPS = 64
TextKind = Literal["text", "input_text", "output_text"]  # of chats, and of OpenAI's newer API
# What Transformers sets where it fills a chat template, and so no client does.
OWN_ARGUMENTS = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"kwargs"}

Asked = TypeVar("Asked", bound=BaseModel)


class BadRequest(ValueError):
    """In one line: the field, what was given, and what it may be."""


def read(kind: type[Asked], body: bytes, name: str, vocabulary: int) -> Asked:
    """The request in a body.

    Args:
        name: of the one model that answers.
        vocabulary: how many tokens the model scores.

    Raises:
        BadRequest: see there.
    """
    try:
        return kind.model_validate_json(body, context={"name": name, "vocabulary": vocabulary})
    except ValidationError as error:
        raise BadRequest(_told(error.errors(include_url=False, include_context=False)[0])) from None


def _told(error: ErrorDetails) -> str:
    if not error["loc"]:
        return f"the body is no JSON object: {error['msg']}"
    *place, last = error["loc"]
    inside = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".")
    if error["type"] == "missing":
        return f"{inside or 'the request'} lacks {last!r}"
    field = _short(f"{inside}[{last}]" if isinstance(last, int) else f"{inside}.{last}".lstrip("."))
    given = f"{field}={_short(json.dumps(error['input']))}"
    if error["type"] == "extra_forbidden":
        return f"{given} is not supported; leave {field} out"
    return f"{given}; {error['msg']}"


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _gives(wanted: str) -> WrapValidator:
    """One message for all that can be wrong with a value."""
    return _refuses("wrong", f"give {wanted}")


def _refuses(kind: str, message: str) -> WrapValidator:
    def check(value: Any, validate: Callable) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError(kind, message) from None

    return WrapValidator(check)


_unsupported = _refuses("extra_forbidden", "")  # told as what no field is
Unsupported = Annotated[None, _unsupported]
Harmless = Any  # what is asked for is nothing that a client would see in the answer
Truth = Annotated[bool | None, _gives("true or false")]
Number = Annotated[float, Field(ge=0, le=0)]
Count = Annotated[Annotated[int, Field(ge=1)] | None, _gives("a whole number of at least 1")]
Temperature = Annotated[Annotated[float, Field(ge=0, le=2)] | None, _gives("a number from 0 to 2")]
Share = Annotated[Annotated[float, Field(ge=0, le=1)] | None, _gives("a number from 0 to 1")]
Text = Annotated[str, _gives("a text")]
Seed = Annotated[
    Annotated[int, Field(ge=-(2**63), lt=2**64)] | None, _gives("a whole number of at most 64 bits")
]  # PyTorch's


class _Object(BaseModel):
    # Strict: "1" and true are no numbers. Other fields than those below are refused.
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Clients fill in fields that nothing here knows; a null in one asks for nothing."""
        if not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if value is not None or key in cls.model_fields}


def _check_name(asked: str | None, info: ValidationInfo[dict]) -> str | None:
    name = info.context["name"]
    if asked not in (None, name):
        raise PydanticCustomError(
            "name", "the server is pinned to '{name}'; give that or leave model out", {"name": name}
        )
    return asked


def _check_tokens(bias: dict[int, float] | None, info: ValidationInfo[dict]) -> dict[int, float] | None:
    vocabulary = info.context["vocabulary"]
    if bias and max(bias) >= vocabulary:
        raise PydanticCustomError("token", "give tokens below {vocabulary}", {"vocabulary": f"{vocabulary:,}"})
    return bias


def _as_list(given: Any) -> Any:
    return [] if given is None else [given] if isinstance(given, str) else given


def _alone(given: Any) -> Any:
    return given[0] if isinstance(given, list) and len(given) == 1 else given


class GenerationFields(_Object):
    """What `transformers chat` sends in one field, besides its messages."""

    max_new_tokens: Count = None
    do_sample: Truth = None
    # From a temperature that does not drown the scores of tokens in infinities.
    temperature: Annotated[Annotated[float, Field(ge=0.01, le=2)] | None, _gives("a number from 0.01 to 2")] = None
    top_p: Share = None
    top_k: Annotated[Annotated[int, Field(ge=0)] | None, _gives("a whole number of at least 0")] = None
    min_p: Share = None
    repetition_penalty: Annotated[
        Annotated[float, Field(ge=0.01, le=100)] | None, _gives("a number from 0.01 to 100")
    ] = None
    num_beams: Annotated[Literal[1] | None, _unsupported] = None

    # The checkpoint's own count.
    bos_token_id: Harmless = None
    eos_token_id: Harmless = None
    pad_token_id: Harmless = None
    transformers_version: Harmless = None

    def settings(self) -> dict[str, Any]:
        """What a generation goes by, of what was given."""
        kept = ("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: getattr(self, name) for name in kept if getattr(self, name) is not None}


class Request(_Object):
    """What both routes know."""

    model: Annotated[Annotated[str | None, _gives("a text")], AfterValidator(_check_name)] = None
    max_tokens: Count = None
    temperature: Temperature = None
    top_p: Share = None
    seed: Seed = None
    stop: Annotated[
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS, fail_fast=True)],
        BeforeValidator(_as_list),
        _gives(f"a text or a list of up to {MAX_STOPS}, none of them empty"),
    ] = []
    logit_bias: Annotated[
        Annotated[
            dict[Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None,
            _gives('numbers from -100 to 100 by token, such as {"5": -100}'),
        ],
        AfterValidator(_check_tokens),
    ] = None
    ignore_eos: Truth = None  # vLLM's: the checkpoint's own tokens end no answer
    stream: Truth = None
    stream_options: Annotated[dict[str, Any] | None, _gives('an object, such as {"include_usage": true}')] = None
    generation_config: Json[GenerationFields] | None = None

    user: Harmless = None
    n: Annotated[Literal[1] | None, _unsupported] = None
    frequency_penalty: Annotated[Number | None, _unsupported] = None
    presence_penalty: Annotated[Number | None, _unsupported] = None

    @property
    def limit(self) -> int | None:
        """Of new tokens."""
        return self.max_tokens


class CompletionRequest(Request):
    prompt: Annotated[str, BeforeValidator(_alone), _gives("one text")]

    best_of: Annotated[Literal[1] | None, _unsupported] = None
    echo: Annotated[Literal[False] | None, _unsupported] = None
    logprobs: Unsupported = None
    suffix: Annotated[Literal[""] | None, _unsupported] = None


class Part(_Object):
    type: Annotated[TextKind, _gives('"text", the one kind that this server reads')]
    text: Text

    annotations: Annotated[Annotated[list, Field(max_length=0)] | None, _unsupported] = None
    cache_control: Harmless = None
    logprobs: Annotated[Annotated[list, Field(max_length=0)] | None, _unsupported] = None


class Function(_Object):
    name: Text
    arguments: Annotated[
        dict[str, Any] | Json[dict[str, Any]],
        BeforeValidator(lambda given: {} if given == "" else given),  # of a function that takes nothing
        _gives("a JSON object, as a text or as it is"),
    ]


class ToolCall(_Object):
    id: Annotated[str | None, _gives("a text")] = None
    index: Harmless = Field(None, exclude=True)  # as it comes in streams
    type: Annotated[Literal["function"], _gives('"function"')] = "function"
    function: Function


def _as_parts(given: Any) -> Any:
    if given is None or isinstance(given, str):
        return [{"type": "text", "text": given or ""}]
    if not isinstance(given, list):
        raise PydanticCustomError("wrong", 'give a text, or a list of parts such as {"type": "text", "text": "Hello"}')
    return given


class Message(_Object):
    role: Text
    content: Annotated[list[Part], Field(fail_fast=True), BeforeValidator(_as_parts)] = []
    name: Annotated[str | None, _gives("a text")] = None
    reasoning_content: Annotated[str | None, _gives("a text")] = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Annotated[str | None, _gives("a text")] = None

    # Of OpenAI's answers, which clients send back as they came.
    annotations: Annotated[Annotated[list, Field(max_length=0)] | None, _unsupported] = None
    audio: Unsupported = None
    function_call: Unsupported = None
    refusal: Unsupported = None

    id: Harmless = Field(None, exclude=True)
    parsed: Harmless = Field(None, exclude=True)
    provider_specific_fields: Harmless = Field(None, exclude=True)
    reasoning: Harmless = Field(None, exclude=True)
    type: Harmless = Field(None, exclude=True)

    def for_template(self) -> dict[str, Any]:
        """As chat templates of models that read text take it."""
        return self.model_dump(exclude_none=True) | {"content": " ".join(part.text for part in self.content)}


class FunctionOffered(_Object):
    model_config = ConfigDict(extra="allow")  # the template writes all of it

    name: Text
    description: Annotated[str | None, _gives("a text")] = None
    parameters: Annotated[dict[str, Any] | None, _gives("a JSON schema")] = None


class Tool(_Object):
    type: Annotated[Literal["function"], _gives('"function"')]
    function: FunctionOffered


def _check_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    if own := sorted(OWN_ARGUMENTS & set(variables or ())):
        raise PydanticCustomError("wrong", "give no {own}, which is no variable of a template", {"own": own[0]})
    return variables


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    chat_template_kwargs: Annotated[
        Annotated[dict[str, Any] | None, _gives("an object")], AfterValidator(_check_variables)
    ] = None

    metadata: Harmless = None
    prediction: Harmless = None
    prompt_cache_key: Harmless = None
    prompt_cache_options: Harmless = None
    prompt_cache_retention: Harmless = None
    safety_identifier: Harmless = None
    service_tier: Harmless = None
    store: Harmless = None

    audio: Unsupported = None
    function_call: Unsupported = None
    functions: Unsupported = None
    logprobs: Annotated[Literal[False] | None, _unsupported] = None
    modalities: Annotated[list[Literal["text"]] | None, _unsupported] = None
    parallel_tool_calls: Annotated[Literal[True] | None, _unsupported] = None
    reasoning_effort: Unsupported = None
    response_format: Annotated["PlainText | None", _unsupported] = None
    tool_choice: Annotated[Literal["auto"] | None, _unsupported] = None
    top_logprobs: Annotated[Annotated[int, Field(ge=0, le=0)] | None, _unsupported] = None
    verbosity: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="before")
    @classmethod
    def _without_tools(cls, given: Any) -> Any:
        """How to call tools says nothing where there are none."""
        if not isinstance(given, dict) or given.get("tools"):
            return given
        nothing = {"tool_choice": "none", "parallel_tool_calls": False}
        return {key: value for key, value in given.items() if key not in nothing or value != nothing[key]}

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class PlainText(_Object):
    type: Literal["text"]
