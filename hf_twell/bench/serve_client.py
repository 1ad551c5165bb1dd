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
    """What a server of this machine answers to all of these bodies of /v1/completions, sent together. A ValueError is
    its own refusal, an aiohttp.ClientError a connection that was refused, or ended before its answer did."""
    return [read_answer(*exchange) for exchange in asyncio.run(_exchange_all(port, bodies))]


async def _exchange_all(port: int, bodies: list[dict]) -> list[tuple[float, list[tuple[float, bytes]]]]:
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector, timeout=timeout) as session:
        return await asyncio.gather(*(_exchange(session, body) for body in bodies))


async def _exchange(session: aiohttp.ClientSession, body: dict) -> tuple[float, list[tuple[float, bytes]]]:
    """When the request was sent, and the pieces of its answer with their times."""
    started = time.perf_counter()
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post("/v1/completions", json=body) as response:
        return started, [(time.perf_counter(), data) async for data in response.content.iter_any()]


def read_answer(started: float, pieces: list[tuple[float, bytes]]) -> Answer:
    """The answer that came in these pieces, a ValueError where they are a refusal or an error. A text has the time of
    the piece that ends its event."""
    texts, usage, rest = [], None, b""
    for at, data in pieces:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if b'"choices"' in event:
                chunk = json.loads(event.strip().removeprefix(b"data:"))
                usage = chunk.get("usage") or usage
                texts += [(at, choice["text"]) for choice in chunk["choices"] if choice.get("text")]
    if usage is None:
        said = b"".join(data for _, data in pieces).decode(errors="replace")
        raise ValueError(f"the server did not answer a request: {' '.join(said.split())[-500:]}")
    (first, _), (last, _) = (texts[0], texts[-1]) if texts else [(pieces[-1][0], "")] * 2
    times, text = len({at for at, _ in texts}), "".join(text for _, text in texts)
    return Answer(started, first, last, times, text, usage["prompt_tokens"], usage["completion_tokens"])
