"""The HTTP routes around one model: Transformers' handlers of OpenAI's requests, and errors in OpenAI's form.

Transformers' own application has routes that load other models, by any client; none is here.
"""

import contextlib
import json
import uuid
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler

from hf_twell.serving.one_model import Generation, OneModel

# Fields that Transformers' handlers pass over though the answer should be another, and what asks for no other.
PASSED_OVER = {
    "n": (None, 1),
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "presence_penalty": (None, 0, 0.0),
    "response_format": (None, {"type": "text"}),
    "reasoning_effort": (None,),
}
RANGES = {"temperature": (0, 2), "top_p": (0, 1)}  # OpenAI's
SEEDS = range(-(2**63), 2**64)  # PyTorch's


def build_app(name: str, model, tokenizer, generation: Generation) -> FastAPI:
    """The application that answers as `name`."""
    manager = OneModel(name, model, tokenizer)
    chat, completion = Chat(manager, generation), Completion(manager, generation)
    app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(_MISTAKES, _answer_mistake))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: dict):
        if tokenizer.chat_template is None:
            raise HTTPException(400, f"the tokenizer of {name} has no chat template; use /v1/completions")
        return _closed(await chat.handle_request(body, f"chatcmpl-{uuid.uuid4().hex}"))

    @app.post("/v1/completions")
    async def completions(body: dict):
        return _closed(await completion.handle_request(body, f"cmpl-{uuid.uuid4().hex}"))

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "hf_twell"}]}

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    return app


class _Exact:
    """Transformers' handlers, but for what they pass over in silence."""

    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        for field, harmless in PASSED_OVER.items():
            given = body.get(field)
            if not any(given == value and type(given) is type(value) for value in harmless):  # 0 is not False
                raise HTTPException(400, f"{field}={json.dumps(given)} is not supported; leave {field} out")
        for field, (least, most) in RANGES.items():
            given = body.get(field)
            if given is not None and not (type(given) in (int, float) and least <= given <= most):
                raise HTTPException(400, f"{field}={json.dumps(given)}; give a number from {least} to {most}")
        seed = body.get("seed")
        if seed is not None and not (type(seed) is int and seed in SEEDS):
            raise HTTPException(400, f"seed={json.dumps(seed)}; give a whole number of at most 64 bits")
        bias = body.get("logit_bias") or {}
        if not (isinstance(bias, dict) and all(map(_is_bias, bias.items()))):
            wanted = 'numbers from -100 to 100 by token, such as {"5": -100}'
            raise HTTPException(400, f"logit_bias={json.dumps(bias)}; give {wanted}")

    def _build_generation_config(self, body: dict, *args, **options):
        # Without the seed: they would set it now, under a request that is still being answered. The bias they know in
        # chats alone, and there no whole numbers.
        config = super()._build_generation_config({**body, "seed": None, "logit_bias": None}, *args, **options)
        config.seed = body.get("seed")  # for StoppableGeneration
        if body.get("logit_bias"):
            config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        temperature, top_p = body.get("temperature"), body.get("top_p")
        # They take both, and still decode greedily unless the checkpoint asks for sampling. A top_p of 1 asks for none.
        if temperature or (temperature is None and top_p is not None and top_p < 1):
            config.do_sample = True
        return config


class Chat(_Exact, ChatCompletionHandler):
    pass


class Completion(_Exact, CompletionHandler):
    def _validate_request(self, body: dict) -> None:
        super()._validate_request(body)
        if "prompt" not in body:  # they would answer the empty one
            raise HTTPException(400, "the request lacks 'prompt'")


def _is_bias(item: tuple) -> bool:
    token, value = item
    return token.isdecimal() and type(value) in (int, float) and -100 <= value <= 100  # OpenAI's range, too


def _closed(response: JSONResponse | StreamingResponse) -> JSONResponse | StreamingResponse:
    """With the last event of OpenAI's streams, which Transformers leaves out and some clients wait for."""
    if isinstance(response, StreamingResponse):
        response.body_iterator = _with_done(response.body_iterator)
    return response


async def _with_done(events: AsyncIterator[str]) -> AsyncIterator[str]:
    async with contextlib.aclosing(events):
        async for event in events:
            yield event
    yield "data: [DONE]\n\n"


# What a request that is no good raises, in our routes, in Transformers' handlers, and in chat templates.
_MISTAKES = (StarletteHTTPException, RequestValidationError, TemplateError, ValueError, KeyError, TypeError)


async def _answer_mistake(_: Request, error: Exception) -> JSONResponse:
    """In OpenAI's form, which its clients read."""
    status, message = 400, str(error)
    if isinstance(error, StarletteHTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, RequestValidationError):
        message = "the body is no JSON object"
    elif isinstance(error, KeyError):
        message = f"the request lacks {error}"
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": status}}, status)
