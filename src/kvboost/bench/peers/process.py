"""A process of a peer: started with a log, and stopped with all it has started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvboost.bench.peers.servers import Server
from kvboost.bench.peers.setting import Setting
from kvboost.errors import KVBoostError

STOP_SECONDS = 10.0
TAIL_LINES = 20
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Process:
    """A process in a group of its own, which is signalled and stopped as one. It must be
    stopped."""

    def __init__(
        self, name: str, command: Sequence[str], variables: Mapping[str, str], *, pipes: bool
    ) -> None:
        """With ``pipes`` we write its standard input and read its standard output."""
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="kvboost-peer-")
        self._log = Path(self._folder.name) / "log.txt"
        try:
            with self._log.open("wb") as log:
                self.popen = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if pipes else log,
                    stderr=log,
                    cwd=self._folder.name,
                    env=variables,
                    start_new_session=True,
                )
        except OSError as error:
            self._folder.cleanup()
            raise KVBoostError(f"{name} could not be started: {error}") from error
        self.pid = self.popen.pid

    def signal(self, number: int) -> bool:
        """Whether the group still exists."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def stop(self) -> None:
        """Ends the group: asked first, then killed."""
        self.signal(signal.SIGTERM)
        try:
            self.popen.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        else:
            deadline = time.monotonic() + STOP_SECONDS
            while time.monotonic() < deadline and self.signal(0):
                time.sleep(0.05)
        self.signal(signal.SIGKILL)
        self.popen.wait()
        self._folder.cleanup()

    def error(self, what: str) -> KVBoostError:
        """An error with the last lines of the log."""
        lines = self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        tail = "\n".join(f"    {line[:300]}" for line in lines) or "    (the log is empty)"
        return KVBoostError(f"{self.name} {what}:\n{tail}")


@dataclass(frozen=True)
class Running:
    """A server that takes requests."""

    url: str
    model: str
    """The model's name at this server."""
    pid: int
    """Also the number of its process group."""
    started_s: float
    """From its start until it was ready."""

    def metric(self, name: str) -> float | None:
        """The value of ``name`` at /metrics; None if the server does not tell it."""
        try:
            with _NO_PROXY.open(f"{self.url}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return None
        return next((float(line.split()[1]) for line in lines if line.startswith(f"{name} ")), None)

    def cpu_seconds(self) -> float | None:
        """Processor time that its processes have used so far; None where there is no /proc."""
        ticks = [sum(map(int, stat[11:13])) for stat in _stats() if int(stat[3]) == self.pid]
        return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None

    def freeze(self) -> None:
        """None of its threads runs until ``thaw``. It must be thawed before it is stopped."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    @contextmanager
    def thawed(self) -> Iterator[None]:
        """It runs as long as the block lasts, and is frozen before and after it."""
        self.thaw()
        try:
            yield
        finally:
            self.freeze()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


@contextmanager
def running(
    server: Server,
    setting: Setting,
    *,
    timeout: float = 600.0,
    may_end: bool = False,
    key: str = "",
) -> Iterator[Running]:
    """``server`` as long as the block lasts; ``timeout`` seconds to become ready. However the block
    ends, also by SIGTERM, nothing of the server is left. A server that ends by itself is an error
    unless it ``may_end``. ``key`` is one that it accepts, if it has any."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    variables = {**os.environ, **server.environment(setting)}
    with sigterm_as_exit():
        start = time.perf_counter()
        process = Process(server.name, server.command(setting, port), variables, pipes=False)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url + server.ready_path, timeout)
            seconds = time.perf_counter() - start
            asked = urllib.request.Request(f"{url}/v1/models", headers={"x-api-key": key})
            with _NO_PROXY.open(asked, timeout=30) as answer:
                model = str(json.load(answer)["data"][0]["id"])
            yield Running(url, model, process.pid, seconds)
            if process.popen.poll() is not None and not may_end:
                raise process.error("ended while it was measured")
        finally:
            process.stop()


def _stats() -> Iterator[list[str]]:
    """The status of each process in Linux, after its name: the fourth field is its session, the
    twelfth and thirteenth its processor time."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            yield file.read_text().rpartition(")")[2].split()


def _wait(process: Process, url: str, timeout: float) -> None:
    """Until ``url`` answers with 200."""
    deadline = time.monotonic() + timeout
    while True:
        if process.popen.poll() is not None:
            raise process.error(f"ended with {process.popen.returncode} before it was ready")
        try:
            with _NO_PROXY.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not yet
        if time.monotonic() > deadline:
            raise process.error(f"was not ready after {timeout:.0f} s")
        time.sleep(0.2)


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that a process that was started is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may choose
        return

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
