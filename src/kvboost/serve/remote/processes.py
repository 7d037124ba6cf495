"""A server whose HTTP is in processes of its own: starts them, restarts them, and stops them."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import kvboost
from kvboost.errors import ConfigError, KVBoostError
from kvboost.serve.process import SWITCH_SECONDS, collecting_rarely, log_to_stderr
from kvboost.serve.remote import wire
from kvboost.serve.remote.host import Host
from kvboost.serve.remote.wire import EmbeddingDescription, EngineDescription, Pipe, Start, ToEngine
from kvboost.serve.settings import RELOADABLE, ServerSettings

logger = logging.getLogger("kvboost.serve")

PROGRAM = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv[1])
from kvboost.serve.remote.worker import main
main(*arguments)
"""
"""The program of an API process. It imports from the same folders as this process."""
MAX_FAILURES = 3
"""So many processes may end before they are ready, one after the other."""
_EXIT_SECONDS = 10.0
"""How long a process may take to end after its time to drain, or after its connection."""
_LOOK_SECONDS = 1.0
"""How often the engine is asked whether it has failed."""


def serve(
    engine: kvboost.KVBoost,
    settings: ServerSettings,
    listening: socket.socket,
    on_ready: Callable[[], None] = lambda: None,
    reread: Callable[[], ServerSettings] | None = None,
) -> None:
    """Like ``process.serve``, with HTTP in another process: this one computes answers and does
    little else. If the other one ends, its requests are cancelled and a new one is started; the
    cache stays. If this one ends, the other one ends too."""
    sys.setswitchinterval(SWITCH_SECONDS)
    log_to_stderr()
    engine.prepare_formats()
    with collecting_rarely():
        asyncio.run(Supervisor(engine, settings, listening, on_ready, reread).run())


@dataclass
class ApiProcess:
    """An API process, from this side."""

    process: subprocess.Popen[bytes]
    host: Host
    is_ready: bool = False

    def ended(self) -> str:
        """Waits until it has ended; returns how. For a thread."""
        try:
            code = self.process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"


class Supervisor:
    """The engine's process of a server."""

    def __init__(
        self,
        engine: kvboost.KVBoost,
        settings: ServerSettings,
        listening: socket.socket,
        on_ready: Callable[[], None],
        reread: Callable[[], ServerSettings] | None,
    ) -> None:
        self._engine = engine
        self._embedding_model = settings.embedding_model
        if self._embedding_model is not None:
            self._embedding_model.between_parts = engine.answer_meanwhile
        self._settings = replace(settings, embedding_model=None)
        self._listening = listening
        self._on_ready = on_ready
        self._reread = reread
        self._api: ApiProcess | None = None
        self._has_been_ready = False
        self._stopping = False
        self._failures = 0
        """Processes that ended before they were ready, since the last that was."""
        self._problem: Exception | None = None
        self._reloads: list[ServerSettings] = []
        """All that were read again, by number."""
        self._unanswered: int | None = None
        """The last of them, until an API process has said what it does with it."""
        self._replacing: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT. Raises KVBoostError if API processes do not start."""
        looking = asyncio.ensure_future(self._look_for_failure())
        try:
            with self._signals():
                self._start()
                await self._over.wait()
                await self._engine.adrain(self._settings.drain_seconds)
                await asyncio.to_thread(self._engine.flush)
        finally:
            looking.cancel()
            self._kill()
        if self._problem is not None:
            raise self._problem

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers: dict[int, Callable[[], None]]
        handlers = {signal.SIGINT: self._stop, signal.SIGTERM: self._stop}
        if self._reread is not None:
            handlers[signal.SIGHUP] = self._reload
        before: dict[int, Any] = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number, earlier in before.items():
                loop.remove_signal_handler(number)
                signal.signal(number, earlier)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = [sys.path, self._listening.fileno(), theirs.fileno()]
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
                pass_fds=[self._listening.fileno(), theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then stops the other
            )
        pipe: Pipe[ToEngine] = Pipe(ours, ToEngine)
        host = Host(
            self._engine,
            pipe,
            self._embedding_model,
            on_ready=self._ready,
            on_lost=self._lost,
            on_reloaded=self._reloaded,
            on_adapters=self._tell_adapters,
        )
        self._api = ApiProcess(process, host)
        pipe.send_bytes(self._first_message())

    def _first_message(self) -> bytes:
        own = self._embedding_model
        return Start(
            EngineDescription.of(self._engine, self._tokenizer),
            self._settings,
            None if own is None else EmbeddingDescription.of(own),
        ).packed()

    @cached_property
    def _tokenizer(self) -> bytes:
        return pickle.dumps(self._engine.prompt_tokenizer)

    def _ready(self) -> None:
        assert self._api is not None
        self._api.is_ready, self._failures = True, 0
        self._send_reload()
        if not self._has_been_ready:
            self._has_been_ready = True
            try:
                self._on_ready()
            except Exception as error:
                self._problem = error
                self._stop()

    def _lost(self) -> None:
        self._replacing = asyncio.ensure_future(self._replace())

    async def _replace(self) -> None:
        """Starts another API process after one has ended, unless the server stops."""
        assert self._api is not None
        ended, was_ready = await asyncio.to_thread(self._api.ended), self._api.is_ready
        self._api = None
        self._failures += not was_ready
        if self._stopping:
            self._over.set()
        elif self._failures == MAX_FAILURES or not self._has_been_ready:
            self._problem = KVBoostError(
                f"the API process ended before it was ready ({ended}); what it wrote is above"
            )
            self._over.set()
        else:
            logger.error(
                "the API process has ended (%s), and its requests with it; another one starts, and "
                "the cache is kept",
                ended,
            )
            try:
                self._start()
            except OSError as error:
                self._problem = KVBoostError(f"no other API process can be started: {error}")
                self._over.set()

    def _stop(self) -> None:
        """Lets running answers finish; called again, it does not."""
        if self._stopping:
            self._kill()
            return
        self._stopping = True
        self._listening.close()  # the API process has it too, and closes it as well
        if self._api is None:
            self._over.set()
            return
        self._api.host.send(wire.Stop())
        longest = self._settings.drain_seconds + _EXIT_SECONDS
        asyncio.get_running_loop().call_later(longest, self._kill)

    def _kill(self) -> None:
        if self._api is not None:
            self._api.process.kill()

    def _reload(self) -> None:
        assert self._reread is not None
        try:
            settings = replace(self._reread(), embedding_model=None)
        except ConfigError as error:
            logger.error("reload: nothing was changed: %s", error)
            return
        self._unanswered = len(self._reloads)
        self._reloads.append(settings)
        self._send_reload()

    def _send_reload(self) -> None:
        """Sends new settings, to the next API process if this one ends before it has answered."""
        if self._unanswered is not None and self._api is not None:
            settings = pickle.dumps(self._reloads[self._unanswered])
            self._api.host.send(wire.Reload(self._unanswered, settings))

    def _reloaded(self, number: int, taken: bool) -> None:
        """A new API process gets the settings that this one has taken over."""
        if number == self._unanswered:
            self._unanswered = None
        if taken:
            new = {name: getattr(self._reloads[number], name) for name in RELOADABLE}
            self._settings = replace(self._settings, **new)

    def _tell_adapters(self) -> None:
        if self._api is not None:
            self._api.host.tell_adapters()

    async def _look_for_failure(self) -> None:
        """Tells the API process if the engine has failed for good."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._engine.failure is not None and self._api is not None:
                self._api.host.send(wire.Failed(wire.to_wire(self._engine.failure)))
