"""The HTTP routes around one model: bodies that are not too large, answers for as long as a client waits, and errors
in OpenAI's form.

Transformers' own application has routes that load other models, by any client; none is here.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_twell.serving.answers import Chat, Completion, Served
from hf_twell.serving.one_model import Answer, Generation
from hf_twell.serving.requests import BadRequest, read

# Of a body: some for tools and the like, and for a prompt that fills the context, escaped as JSON in any script.
BODY_BYTES, BYTES_PER_TOKEN, USUAL_CONTEXT = 2**20, 32, 2**17
DROPPED_BYTES = 2**26  # of one that is too large, read and dropped, as most clients send all before they read


def build_app(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, generation: Generation) -> FastAPI:
    """The application that answers as `name`."""
    served = Served(name, model, tokenizer)
    most = BODY_BYTES + BYTES_PER_TOKEN * (served.context or USUAL_CONTEXT)
    app = FastAPI(openapi_url=None, exception_handlers=dict.fromkeys(_MISTAKES, _answer_mistake))

    async def answer(request: Request, kind: type[Chat] | type[Completion]) -> Response:
        asked = read(kind.asked, await _body(request, most), name, served.vocabulary)
        turn = Answer(generation, asked.seed, asked.stop)
        handler: Any = kind(served, turn)
        events = handler.events(asked, await asyncio.to_thread(handler.prompt, asked))
        if asked.stream:
            return _Stream(events, turn)
        try:
            return JSONResponse(await _while_waited_for(request, handler.whole(events)))
        finally:
            turn.cancel()

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request):
        return await answer(request, Chat)

    @app.post("/v1/completions")
    async def completions(request: Request):
        return await answer(request, Completion)

    @app.get("/v1/models")
    async def models():
        return {"object": "list", "data": [{"id": name, "object": "model", "created": 0, "owned_by": "hf_twell"}]}

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    return app


async def _body(request: Request, most: int) -> bytes:
    """Whatever its content type.

    Raises:
        HTTPException: it is larger than `most` bytes; no more than that is kept.
        ClientDisconnect: its client has gone.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        else:
            parts.clear()
        if size > most + DROPPED_BYTES:
            break
    if size > most:
        raise HTTPException(413, f"the body has more than {most:,} bytes; give a shorter prompt")
    return b"".join(parts)


async def _while_waited_for(request: Request, answering: Coroutine) -> Any:
    """What `answering` returns.

    Raises:
        ClientDisconnect: the client has gone before it did, and it is cancelled.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (answering, _gone(request))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ClientDisconnect
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Stream(StreamingResponse):
    """Events until the answer ends, or until its client goes, be it before the first."""

    def __init__(self, events: AsyncGenerator[str, None], turn: Answer) -> None:
        super().__init__(_closed(events), media_type="text/event-stream")
        self._turn = turn

    async def __call__(self, *args) -> None:
        try:
            await super().__call__(*args)
        finally:
            self._turn.cancel()


async def _closed(events: AsyncGenerator[str, None]) -> AsyncIterator[str]:
    """With the last event of OpenAI's streams, which Transformers leaves out and some clients wait for."""
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                yield event
        except Exception as error:
            logging.getLogger(__name__).exception("an answer failed")
            yield f"data: {json.dumps(_told(error)[1])}\n\n"
    yield "data: [DONE]\n\n"


_MISTAKES = (BadRequest, StarletteHTTPException, ClientDisconnect, Exception)


async def _answer_mistake(_: Request, error: Exception) -> JSONResponse:
    status, told = _told(error)
    return JSONResponse(told, status)


def _told(error: Exception) -> tuple[int, dict[str, Any]]:
    """A status, and the error in OpenAI's form, which its clients read."""
    status, message = 500, f"the answer failed: {error}"
    if isinstance(error, BadRequest):
        status, message = 400, str(error)
    elif isinstance(error, StarletteHTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, ClientDisconnect):
        status, message = 400, "the client has gone"  # nobody reads it
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "code": status}}
