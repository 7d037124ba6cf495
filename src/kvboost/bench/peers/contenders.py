"""The engines of a run. One that is missing or fails is reported; the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from rich.text import Text

from kvboost.bench.peers.engines import Engine
from kvboost.bench.peers.process import sigterm_as_exit
from kvboost.bench.peers.setting import Setting
from kvboost.bench.peers.worker import ASK_SECONDS, Answer, Worker
from kvboost.errors import KVBoostError
from kvboost.progress import Progress


class Contenders:
    """Workers by name. They live as long as the ``with`` block."""

    def __init__(
        self,
        engines: Sequence[Engine],
        setting: Setting,
        decode: Callable[[list[int]], str],
        *,
        ask_seconds: float = ASK_SECONDS,
    ) -> None:
        found = {engine.name: engine.missing(setting) for engine in engines}
        self.missing = {name: why for name, why in found.items() if why is not None}
        """Why an engine cannot run here, and what to do."""
        self.failures: dict[str, str] = {}
        """Why an engine was given up."""
        self._engines = [engine for engine in engines if engine.name not in self.missing]
        self._setting = setting
        self._decode = decode
        self._ask_seconds = ask_seconds
        self._workers: dict[str, Worker] = {}
        self._described: dict[str, dict[str, object]] = {}
        """Each loaded engine, also one that failed later."""
        self._stack = ExitStack()

    def start(self, progress: Progress) -> None:
        """Loads one after the other."""
        for engine in self._engines:
            with progress.step(f"loading {engine.name}"):
                try:
                    worker = Worker(engine, self._setting)
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
        """Engines that still work."""
        return list(self._workers)

    def ask(self, name: str, ids: list[int]) -> Answer | None:
        """None if the engine does not work any more."""
        worker = self._workers.get(name)
        if worker is None:
            return None
        try:
            return worker.ask(ids, self._decode(ids), timeout=self._ask_seconds)
        except KVBoostError as error:
            self.failures[name] = str(error)
            self._workers.pop(name).close()
            return None

    def __enter__(self) -> Contenders:
        self._stack.enter_context(sigterm_as_exit())
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()
        self._stack.close()

    def lines(self) -> Iterator[Text]:
        """The results: what was measured, what was missing and why, what failed."""
        for name, what in self._described.items():
            yield Text(f"{name}: {what['version']}, weights {what['weights']}", style="dim")
        for name, why in self.missing.items():
            yield Text(f"{name} is missing: {why}", style="yellow")
        for name, why in self.failures.items():
            yield Text(f"{name} was given up: {why}", style="red")

    def as_json(self) -> dict[str, object]:
        return {"engines": self._described, "missing": self.missing, "failures": self.failures}
