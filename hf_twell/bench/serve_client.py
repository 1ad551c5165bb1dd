"""Streamed completions of many requests at once, and when their first and last tokens came.

Pieces are only noted with their times while they arrive, and read afterwards: a client that parses as it goes would
take processor time from the server, and be late for many streams.
"""

import asyncio
import bisect
import itertools
import json
import time
from typing import NamedTuple

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
    exchanges = asyncio.run(_exchange_all(port, [_request(port, body) for body in bodies]))
    return [read_answer(exchange.started, exchange.pieces) for exchange in exchanges]


def _request(port: int, body: dict) -> bytes:
    data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


async def _exchange_all(port: int, requests: list[bytes]) -> list["_Exchange"]:
    loop = asyncio.get_running_loop()
    try:  # all are connected before the first is sent
        connected = [await loop.create_connection(_Exchange, HOST, port) for _ in requests]
    except OSError as error:
        raise BrokenAnswer(str(error)) from error
    exchanges = [exchange for _, exchange in connected]
    for exchange, request in zip(exchanges, requests, strict=True):
        exchange.send(request)
    await asyncio.gather(*(exchange.closed for exchange in exchanges))
    return exchanges


class _Exchange(asyncio.Protocol):
    """One request, and the pieces of its answer with their times."""

    def __init__(self):
        self.pieces: list[tuple[float, bytes]] = []
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport):
        self.transport = transport

    def send(self, request: bytes) -> None:
        self.started = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.perf_counter(), data))

    def connection_lost(self, error) -> None:
        if not self.closed.done():  # as it is where Ctrl-C has cancelled it
            self.closed.set_result(None)


def read_answer(started: float, pieces: list[tuple[float, bytes]]) -> Answer:
    """The answer whose HTTP response came in these pieces.

    Raises: as `ask_at_once`.
    """
    times = [at for at, _ in pieces]
    ends = list(itertools.accumulate(len(data) for _, data in pieces))
    head, found, _ = (raw := b"".join(data for _, data in pieces)).partition(b"\r\n\r\n")
    if not found:
        raise BrokenAnswer("no answer")
    body, raw_ends = _body(raw, len(head) + 4, b"transfer-encoding: chunked" in head.lower())
    if head.split(b" ", 2)[1] != b"200":
        raise ValueError(f"the server refused a request: {_message(body)}")
    texts, usage = [], None
    for event, end in _events(body):
        if "error" in event:
            raise ValueError(f"the server failed in an answer: {_message(json.dumps(event).encode())}")
        usage = event.get("usage") or usage
        text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
        if text:
            texts.append((times[bisect.bisect_left(ends, raw_ends(end))], text))
    if usage is None:
        raise BrokenAnswer("an answer ended before its last event")
    (first, _), (last, _) = (texts[0], texts[-1]) if texts else [(times[-1], "")] * 2
    pieces, text = len({at for at, _ in texts}), "".join(text for _, text in texts)
    return Answer(started, first, last, pieces, text, usage["prompt_tokens"], usage["completion_tokens"])


def _events(body: bytes):
    """(what an event holds, where it ends in the body) for each but the [DONE]."""
    start = 0
    while (end := body.find(END, start)) >= 0:
        event, start = body[start:end].strip(), end + len(END)
        if event.startswith(b"data:") and event[5:].strip() != b"[DONE]":
            yield json.loads(event[5:]), start


def _body(raw: bytes, start: int, chunked: bool):
    """The body of a response that begins at `start`, and a function from a place in it to that in `raw`."""
    if not chunked:
        return raw[start:], lambda place: start + place
    parts, places = [], [(0, start)]  # where each part begins: in the body, in `raw`
    while (line := raw.find(b"\r\n", start)) >= 0 and (size := int(raw[start:line].split(b";")[0], 16)):
        parts.append(raw[line + 2 : line + 2 + size])
        places.append((places[-1][0] + len(parts[-1]), line + 2 + size))
        start = line + 2 + size + 2
    begins = [place for place, _ in places]
    return b"".join(parts), lambda place: places[bisect.bisect_left(begins, place)][1]


def _message(body: bytes) -> str:
    """Of an error in OpenAI's form, or in none."""
    try:
        error = json.loads(body)["error"]
        return error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:500] or "without a word"
