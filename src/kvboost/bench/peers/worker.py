"""Our end of the pipe: an engine in a process of its own, asked one thing at a time.

The clock is ours: from writing the request to reading the line that says the first token is there.
A worker is frozen while it is not asked, so that none of its threads runs in another's time.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.bench.peers.engines import Engine
from kvboost.bench.peers.process import Process
from kvboost.bench.peers.setting import Setting
from kvboost.errors import KVBoostError

LOAD_SECONDS = 600.0
ASK_SECONDS = 120.0
MAX_TOKENS = 2
"""Two, so that an engine that streams reports the first and keeps the prompt after that."""


@dataclass(frozen=True)
class Answer:
    """An answer, by our clock."""

    ttft_ms: float
    total_ms: float
    prompt_tokens: int | None
    """As the engine counts; None where it does not tell, as below."""
    cached_tokens: int | None


class Worker:
    """A loaded engine. It must be closed; it ends by itself if we do."""

    def __init__(self, engine: Engine, setting: Setting, timeout: float = LOAD_SECONDS) -> None:
        """Starts it and waits until its model is loaded."""
        self._unread = b""
        started = time.perf_counter()
        variables = engine.variables(setting)
        self._process = Process(engine.name, engine.command(), variables, pipes=True)
        try:
            self._write({"load": engine.given(setting)})
            ready = self._read("ready", time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.weights = str(ready["weights"])
        self.loaded_s = time.perf_counter() - started
        self._process.signal(signal.SIGSTOP)

    def ask(self, ids: Sequence[int], text: str, timeout: float = ASK_SECONDS) -> Answer:
        """Answers the prompt ``ids``, which is ``text``. Raises ``KVBoostError`` if that fails or
        takes longer than ``timeout`` seconds; the worker is of no use after that."""
        line = {"generate": {"ids": list(ids), "text": text, "max_tokens": MAX_TOKENS}}
        deadline = time.monotonic() + timeout
        self._process.signal(signal.SIGCONT)
        start = time.perf_counter()
        self._write(line)
        self._read("first", deadline)
        first = time.perf_counter()
        said = self._read("end", deadline)
        end = time.perf_counter()
        self._process.signal(signal.SIGSTOP)
        counts = said.get("prompt_tokens"), said.get("cached_tokens")
        return Answer((first - start) * 1e3, (end - start) * 1e3, *counts)

    def close(self) -> None:
        self._process.signal(signal.SIGCONT)  # a frozen process does not hear other signals
        for pipe in (self._process.popen.stdin, self._process.popen.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # it has ended before it read all
        self._process.stop()

    def _write(self, line: dict[str, Any]) -> None:
        pipe = self._process.popen.stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(line).encode() + b"\n")
            pipe.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _read(self, wanted: str, deadline: float) -> Any:
        """The contents of the next line, which must be ``wanted``."""
        said = json.loads(self._line(deadline))
        if wanted not in said:
            why = said.get("error", f"it said {said} instead of {wanted!r}")
            raise self._process.error(f"failed: {why}")
        return said[wanted]

    def _line(self, deadline: float) -> bytes:
        assert self._process.popen.stdout is not None
        pipe = self._process.popen.stdout.fileno()
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise self._process.error("did not answer in time")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> KVBoostError:
        try:
            code = self._process.popen.wait(5)
        except subprocess.TimeoutExpired:
            return self._process.error("closed its pipe")
        return self._process.error(f"ended with {code}")
