"""The process of a server: its socket, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette

import kvboost
from kvboost.errors import ConfigError
from kvboost.serve.app import create_app
from kvboost.serve.http.connections import Connection, NetworkState
from kvboost.serve.server import ServerState
from kvboost.serve.settings import ServerSettings, check_certificate

logger = logging.getLogger("kvboost.serve")

_KEEP_ALIVE = 15
SWITCH_SECONDS = 5e-4
"""One thread computes answers and another sends them. The first needs Python only for a moment
between two operations and should not wait long for it. Python's default is ten times this."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to its port, so that a port in use is noticed before a model is loaded. No
    client can connect until the server listens. Port 0 means any free port.

    The socket names its protocol: asyncio sets ``TCP_NODELAY`` only on connections of sockets that
    do, and without it every answer on a connection that is used again waits 40 ms for the client's
    acknowledgement of the one before."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error}; choose another with --host or --port"
        ) from None
    return listening


def serve(
    engine: kvboost.KVBoost,
    settings: ServerSettings,
    listening: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    reread: Callable[[], ServerSettings] | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. Then accepts no new requests, gives running answers
    ``drain_seconds`` to finish and flushes the cache. The caller closes the engine. If ``reread``
    is given, SIGHUP calls it and takes over the settings that a running server can change."""
    sys.setswitchinterval(SWITCH_SECONDS)
    engine.prepare_formats()
    app = create_app(engine, settings)
    state: ServerState = app.state.server
    with collecting_rarely():
        run(app, listening, on_ready, reread and (lambda: state.reload(reread())))


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Makes Python's garbage collector run less often, and exempts the objects that exist now,
    which stay. The cache holds many long-lived objects without cycles: by default, a server with
    many users would spend an eighth of its time looking through them."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(10_000, 10, 500)
    try:
        yield
    finally:
        # Frozen objects are never freed, of which triton's library, where it is installed,
        # complains in thirty lines at the end of the process.
        gc.unfreeze()
        gc.set_threshold(*usual)


def run(
    app: Starlette,
    listening: socket.socket,
    on_ready: Callable[[], None],
    on_reload: Callable[[], list[str]] | None = None,
) -> None:
    """Runs ``app``, whose ``state.server`` is a NetworkState, until SIGTERM or SIGINT."""
    log_to_stderr()
    Server(app, on_ready, on_reload).run(sockets=[listening])


class Server(uvicorn.Server):
    """uvicorn's server, with our connections. A signal only ends the serving: uvicorn would raise
    it again afterwards and end the process before the engine is closed."""

    def __init__(
        self,
        app: Starlette,
        on_ready: Callable[[], None],
        on_reload: Callable[[], list[str]] | None = None,
    ) -> None:
        self.state: NetworkState = app.state.server
        self._on_ready = on_ready
        self._on_reload = on_reload
        settings = self.state.settings
        super().__init__(
            uvicorn.Config(
                app,
                loop="auto",  # uvloop, where it is installed
                http=Connection,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.state.draining = True
        if running := len(self.server_state.tasks):
            seconds = self.state.settings.drain_seconds
            said = "stopping: waits up to %g s for %d running requests; Ctrl-C ends them at once"
            logger.info(said, seconds, running)
        await super().shutdown(sockets)

    def reload(self) -> None:
        """Reads the settings and the TLS certificate again."""
        assert self._on_reload is not None
        self.take_over(self._on_reload)

    def take_over(self, change: Callable[[], list[str]]) -> bool:
        """Changes settings, reads the TLS certificate again, and logs what ``change`` says has
        changed. If there is a mistake, nothing changes, and it returns False. Connections that are
        open keep their certificate."""
        cert, key = self.state.settings.tls_cert, self.state.settings.tls_key
        try:
            check_certificate(cert, key)
            changed = change()
        except ConfigError as error:
            logger.error("reload: nothing was changed: %s", error)
            return False
        if cert is not None and self.config.ssl is not None:
            self.config.ssl.load_cert_chain(cert, key)
            changed = [*changed, "TLS certificate (read again)"]
        logger.info("reload: changed %s", ", ".join(changed) or "nothing")
        return True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM)
        before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self.handle_exit) for number in handled
        }
        loop = asyncio.get_running_loop()
        if self._on_reload is not None:
            before[signal.SIGHUP] = signal.getsignal(signal.SIGHUP)  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self.reload)
        try:
            yield
        finally:
            if self._on_reload is not None:
                loop.remove_signal_handler(signal.SIGHUP)
            for number, handler in before.items():
                signal.signal(number, handler)


def log_to_stderr() -> None:
    """Logs our own messages, and uvicorn's warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in (("kvboost", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers[:] = [handler]
        logger.propagate = False
