"""Our end of the pipe: an engine in a process of its own, asked one thing at a time.

The clock is ours: from writing the request to reading the line that says the first token is there.
While it is not asked a worker is frozen, so that no thread of it runs in another's time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvboost.bench.peers.base import Setting
from kvboost.bench.peers.engines import Engine
from kvboost.bench.peers.process import signal_group, stop, tail
from kvboost.errors import KVBoostError

LOAD_SECONDS = 600.0
ASK_SECONDS = 120.0
MAX_TOKENS = 2
"""Two, so that one that streams says so at the first and keeps the prompt after that."""


@dataclass(frozen=True)
class Answer:
    """What came back, by our clock."""

    ttft_ms: float
    total_ms: float
    prompt_tokens: int | None
    """As the engine counts; None where it does not tell, as below."""
    cached_tokens: int | None


class Worker:
    """An engine that is loaded. To be closed; ends by itself if we do."""

    def __init__(self, engine: Engine, setting: Setting, timeout: float = LOAD_SECONDS) -> None:
        """Starts it and waits until its model is loaded."""
        self.name = engine.name
        self._folder = tempfile.TemporaryDirectory(prefix="kvboost-worker-")
        self._log = Path(self._folder.name) / "log.txt"
        self._unread = b""
        started = time.perf_counter()
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    engine.command(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    cwd=self._folder.name,
                    env=engine.variables(setting),
                    start_new_session=True,  # a group of its own, frozen and stopped as one
                )
        except OSError as error:
            self._folder.cleanup()
            raise KVBoostError(f"{self.name} could not be started: {error}") from error
        try:
            self._write({"load": engine.given(setting)})
            ready = self._read("ready", time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.weights = str(ready["weights"])
        self.loaded_s = time.perf_counter() - started
        self._freeze()

    def ask(
        self,
        ids: Sequence[int],
        text: str,
        max_tokens: int = MAX_TOKENS,
        timeout: float = ASK_SECONDS,
    ) -> Answer:
        """Answers the prompt ``ids``, which is ``text``. Raises ``KVBoostError`` if that fails or
        takes longer than ``timeout`` seconds; the worker is of no use after that."""
        line = {"generate": {"ids": list(ids), "text": text, "max_tokens": max_tokens}}
        deadline = time.monotonic() + timeout
        self._thaw()
        start = time.perf_counter()
        self._write(line)
        self._read("first", deadline)
        first = time.perf_counter()
        said = self._read("end", deadline)
        end = time.perf_counter()
        self._freeze()
        return Answer(
            (first - start) * 1e3,
            (end - start) * 1e3,
            said.get("prompt_tokens"),
            said.get("cached_tokens"),
        )

    def close(self) -> None:
        self._thaw()  # the frozen are deaf
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it has ended before it read all
        stop(self._process)
        self._folder.cleanup()

    def _freeze(self) -> None:
        signal_group(self._process.pid, signal.SIGSTOP)

    def _thaw(self) -> None:
        signal_group(self._process.pid, signal.SIGCONT)

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self, wanted: str, deadline: float) -> Any:
        """What the next line says, which must be ``wanted``."""
        said = json.loads(self._line(deadline))
        if wanted not in said:
            why = said.get("error", f"it said {said} instead of {wanted!r}")
            raise KVBoostError(f"{self.name} failed: {why}\n{tail(self._log)}")
        return said[wanted]

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise KVBoostError(f"{self.name} did not answer in time:\n{tail(self._log)}")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> KVBoostError:
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return KVBoostError(f"{self.name} closed its pipe:\n{tail(self._log)}")
        return KVBoostError(f"{self.name} ended with {code}:\n{tail(self._log)}")
