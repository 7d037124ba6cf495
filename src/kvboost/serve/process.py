"""The process around the application: sockets, signals, and an orderly end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from kvboost.errors import ConfigError
from kvboost.serve.app import create_app
from kvboost.serve.server import ServerState
from kvboost.serve.settings import ServerSettings

if TYPE_CHECKING:
    from kvboost import KVBoost

_MAX_LINE = 64 * 1024  # of a request's head, before the application may judge it
_KEEP_ALIVE = 15
SWITCH_SECONDS = 5e-4
"""Sending answers and computing them are two threads. The one that computes is quick between two
operations and should not wait long for the other; Python's own interval is ten times this."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that has its port, so that one that is taken is known before a model is loaded.
    Nobody can connect until the server listens. Port 0 takes any that is free."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from None
    return listening


def serve(
    engine: KVBoost,
    settings: ServerSettings,
    listening: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until SIGTERM or SIGINT: then nobody new is let in, running answers have
    ``drain_seconds`` to end, and the cache is flushed. The engine stays the caller's to close."""
    _log_to_stderr()
    sys.setswitchinterval(SWITCH_SECONDS)
    Server(create_app(engine, settings), on_ready).run(sockets=[listening])


class Server(uvicorn.Server):
    """uvicorn's, but a signal only ends the serving: uvicorn raises it once more when it is
    done, and the process would be gone before the engine is closed."""

    def __init__(self, app: FastAPI, on_ready: Callable[[], None]) -> None:
        self.serving: ServerState = app.state.serving
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http="h11",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                h11_max_incomplete_event_size=_MAX_LINE,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=max(1, round(self.serving.settings.drain_seconds)),
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.serving.draining = True
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self.handle_exit) for number in handled
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _log_to_stderr() -> None:
    """Our own lines, and uvicorn's when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("kvboost", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = [handler]
        logger.propagate = False
