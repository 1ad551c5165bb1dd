"""Streamed completions of many requests at once, and when their first and last tokens came.

Pieces are only noted with their times while they arrive, and read afterwards: a client that parses as it goes would
take processor time from the server, and be late for many streams.
"""

import asyncio
import json
import time
from typing import NamedTuple

import aiohttp

HOST = "127.0.0.1"
END = b"\n\n"  # of an event


class BrokenAnswer(ConnectionError):
    """The connection was refused, or ended before its answer did."""


class Answer(NamedTuple):
    """One completion; times are seconds of `time.perf_counter`.

    Attributes:
        first, last: when the first and the last piece of text came.
        pieces: at how many times text came; far fewer than tokens where the server or this client had to wait for a
            processor.
        prompt_tokens, new_tokens: as the server counts them.
    """

    started: float
    first: float
    last: float
    pieces: int
    text: str
    prompt_tokens: int
    new_tokens: int


def ask_at_once(port: int, bodies: list[dict]) -> list[Answer]:
    """What a server of this machine answers to all of these bodies of /v1/completions, sent together.

    Raises:
        BrokenAnswer: see there.
        ValueError: the server's own refusal.
    """
    return [read_answer(*exchange) for exchange in asyncio.run(_exchange_all(port, bodies))]


async def _exchange_all(port: int, bodies: list[dict]) -> list[tuple[float, int, list]]:
    all_connected, trace = asyncio.Barrier(len(bodies)), aiohttp.TraceConfig()

    async def wait_for_others(*_):
        await all_connected.wait()

    async def note_time(session, context, _):
        context.trace_request_ctx.append(time.perf_counter())

    trace.on_connection_create_end.append(wait_for_others)
    trace.on_request_headers_sent.append(note_time)
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    try:
        async with aiohttp.ClientSession(
            f"http://{HOST}:{port}", connector=connector, timeout=timeout, trace_configs=[trace]
        ) as session:
            return await asyncio.gather(*(_exchange(session, body) for body in bodies))
    except aiohttp.ClientError as error:
        raise BrokenAnswer(str(error)) from error


async def _exchange(session: aiohttp.ClientSession, body: dict) -> tuple[float, int, list[tuple[float, bytes]]]:
    """When the request was sent, the answer's status, and the pieces of its body with their times."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    started: list[float] = []  # filled when the request is sent
    async with session.post("/v1/completions", json=asked, trace_request_ctx=started) as response:
        pieces = [(time.perf_counter(), data) async for data in response.content.iter_any()]
        return started[0], response.status, pieces


def read_answer(started: float, status: int, pieces: list[tuple[float, bytes]]) -> Answer:
    """The answer of this status whose body came in these pieces; a text has the time of the piece that ends its event.

    Raises: as `ask_at_once`.
    """
    if status != 200:
        raise ValueError(f"the server refused a request: {_message(b''.join(data for _, data in pieces))}")
    texts, usage, rest = [], None, b""
    for at, data in pieces:
        *events, rest = (rest + data).split(END)
        for event in (event.strip() for event in events):
            if not event.startswith(b"data:") or event[5:].strip() == b"[DONE]":
                continue
            held = json.loads(event[5:])
            if "error" in held:
                raise ValueError(f"the server failed in an answer: {_message(event[5:])}")
            usage = held.get("usage") or usage
            if text := "".join(choice.get("text") or "" for choice in held.get("choices", ())):
                texts.append((at, text))
    if usage is None:
        raise BrokenAnswer("an answer ended before its last event")
    (first, _), (last, _) = (texts[0], texts[-1]) if texts else [(pieces[-1][0], "")] * 2
    times, text = len({at for at, _ in texts}), "".join(text for _, text in texts)
    return Answer(started, first, last, times, text, usage["prompt_tokens"], usage["completion_tokens"])


def _message(body: bytes) -> str:
    """Of an error in OpenAI's form, or in none."""
    try:
        error = json.loads(body)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:500] or "without a word"
