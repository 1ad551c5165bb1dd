"""The process around the application: its port, and a clean stop."""

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

if TYPE_CHECKING:
    from fastapi import FastAPI

STOP_SECONDS = 5  # for clients to be told that their answers end, once Ctrl-C has stopped what is generated


def bind(host: str, port: int) -> socket.socket:
    """Listen at a port, before a model is loaded that could then not be served; requests wait. An OSError of one line
    says what is wrong with the address."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(
            f"cannot serve on {host} port {port}: {error.strerror}; give an address of this machine as --host, such as "
            "127.0.0.1, and a free --port"
        ) from error


def url(listener: socket.socket) -> str:
    """At which this machine reaches the server."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: "FastAPI", listener: socket.socket, on_ready: Callable[[], object], on_stop: Callable[[], object]
) -> None:
    """Answer requests until Ctrl-C (or SIGTERM, which then ends the process as it would have)."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=STOP_SECONDS)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it once more, after its clean stop
        _Server(config, on_ready, on_stop).run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], object], on_stop: Callable[[], object]) -> None:
        super().__init__(config)
        self.on_ready, self.on_stop = on_ready, on_stop

    async def startup(self, *args, **options) -> None:
        await super().startup(*args, **options)
        self.on_ready()  # not before: until now Ctrl-C was no clean stop

    async def shutdown(self, *args, **options) -> None:
        self.on_stop()
        await super().shutdown(*args, **options)
