"""``kvboost serve`` or ``kvboost route`` as a process of the test's own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType


class ServerProcess:
    """Started on a free port; its address is known once it listens. What it writes to standard
    error is kept in ``log``."""

    def __init__(
        self,
        *arguments: str,
        folder: Path,
        command: str = "serve",
        python: str = sys.executable,
        start_seconds: float = 400.0,
        **environment: str,
    ) -> None:
        self._errors = folder / f"{command}.log"
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-m", "kvboost", command, "--port", "0", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "COLUMNS": "200", **environment},
            )
        assert self._process.stdout is not None
        watchdog = threading.Timer(start_seconds, self._process.kill)
        watchdog.start()
        self.url = self._process.stdout.readline().strip()
        watchdog.cancel()
        assert self.url.startswith("http://"), self.log

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._errors.read_text()

    @property
    def root(self) -> str:
        return self.url.removesuffix("/v1")

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)

    def wait(self, seconds: float = 300.0) -> int:
        """Its exit code."""
        return self._process.wait(seconds)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
