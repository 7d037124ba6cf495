"""The engines of a run: who is there, who is missing, who failed. The others go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType

from kvboost.bench.peers.base import Setting
from kvboost.bench.peers.engines import Engine
from kvboost.bench.peers.process import sigterm_as_exit
from kvboost.bench.peers.worker import ASK_SECONDS, LOAD_SECONDS, Answer, Worker
from kvboost.errors import KVBoostError
from kvboost.progress import Progress


class Crew:
    """Workers by name. They live as long as the ``with`` block."""

    def __init__(
        self,
        engines: Sequence[Engine],
        setting: Setting,
        decode: Callable[[list[int]], str],
        *,
        load_seconds: float = LOAD_SECONDS,
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        found = {engine.name: engine.missing(setting) for engine in engines}
        self.missing = {name: why for name, why in found.items() if why is not None}
        """Why an engine is not there, and what to do."""
        self.failures: dict[str, str] = {}
        """Why one was given up."""
        self._engines = [engine for engine in engines if engine.name not in self.missing]
        self._setting = setting
        self._decode = decode
        self._seconds = load_seconds, ask_seconds
        self._workers: dict[str, Worker] = {}
        self._described: dict[str, dict[str, object]] = {}
        self._stack = ExitStack()

    def start(self, progress: Progress) -> None:
        """Loads one after the other."""
        for engine in self._engines:
            with progress.step(f"loading {engine.name}"):
                try:
                    worker = Worker(engine, self._setting, self._seconds[0])
                except KVBoostError as error:
                    self.failures[engine.name] = str(error)
                    continue
            self._workers[engine.name] = worker
            self._described[engine.name] = {
                "version": worker.version,
                "weights": worker.weights,
                "threads": self._setting.threads,
                "loaded_s": worker.loaded_s,
                **engine.options,
            }

    @property
    def names(self) -> list[str]:
        """Those that still work."""
        return list(self._workers)

    @property
    def described(self) -> Mapping[str, Mapping[str, object]]:
        """What each that was loaded is, also if it failed later."""
        return self._described

    def ask(self, name: str, ids: list[int]) -> Answer | None:
        """None if the worker does not work any more."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        try:
            return worker.ask(ids, self._decode(ids), timeout=self._seconds[1])
        except KVBoostError as error:
            self.failures[name] = str(error)
            self._workers.pop(name).close()
            return None

    def __enter__(self) -> Crew:
        self._stack.enter_context(sigterm_as_exit())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._stack.close()
