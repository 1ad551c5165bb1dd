"""The process around the application: its port, the word that it is ready, and a clean stop."""

import contextlib
import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

STOP_SECONDS = 5  # for answers to end in, once Ctrl-C has stopped what is generated


def bind(host: str, port: int) -> socket.socket:
    """Take the port, before a model is loaded that could then not be served.

    Raises:
        OSError: in one line, what was given and what is wrong with it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OSError(f"--host {host}: {error.strerror}; give an address of this machine, such as 127.0.0.1") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was left a moment ago is free
        listener.bind(address)
    except OSError as error:
        listener.close()
        fix = "give an address of this machine" if error.errno == errno.EADDRNOTAVAIL else "give another --port"
        raise OSError(f"cannot serve on {host} port {port}: {error.strerror}; {fix}") from error
    return listener


def url(listener: socket.socket) -> str:
    """At which this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(app: "FastAPI", listener: socket.socket, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
    """Answer requests until Ctrl-C (or SIGTERM, which then ends the process as it would have)."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=STOP_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it once more, after its clean stop
        _Server(config, on_ready, on_stop).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None], on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self.on_ready, self.on_stop = on_ready, on_stop

    async def startup(self, *args, **options) -> None:
        await super().startup(*args, **options)
        self.on_ready()

    async def shutdown(self, *args, **options) -> None:
        self.on_stop()
        await super().shutdown(*args, **options)
