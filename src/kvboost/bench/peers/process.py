"""A server's process: started, waited for, and stopped with all it has started."""

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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvboost.bench.peers.base import Peer, Setting
from kvboost.errors import KVBoostError

STOP_SECONDS = 10.0
TAIL_LINES = 20
_NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Running:
    """A server that takes requests."""

    url: str
    model: str
    """What it calls the model."""
    pid: int
    """Also the number of its process group."""
    started_s: float
    """From its start until it was ready."""


@contextmanager
def running(peer: Peer, setting: Setting, *, timeout: float = 600.0) -> Iterator[Running]:
    """``peer`` as long as the block lasts; ``timeout`` seconds to become ready. However the block
    ends, also by SIGTERM, nothing of the server is left."""
    port = free_port()
    added = [f"{name}={value}" for name, value in peer.environment(setting).items()]
    with tempfile.TemporaryDirectory(prefix="kvboost-serve-") as folder, sigterm_as_exit():
        log = Path(folder) / "log.txt"
        start = time.perf_counter()
        with log.open("wb") as out:
            process = subprocess.Popen(
                ["env", *added, *peer.command(setting, port)],  # on top of the environment
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                start_new_session=True,  # a group of its own, which is stopped as one
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(peer, process, url, log, timeout)
            seconds = time.perf_counter() - start
            yield Running(url, _served_model(url), process.pid, seconds)
            if process.poll() is not None:
                raise KVBoostError(f"{peer.name} ended while it was measured:\n{tail(log)}")
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the process and its group: asked first, then killed."""
    signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    else:
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and signal_group(process.pid, 0):
            time.sleep(0.05)
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path) -> str:
    """The last lines of a log, indented."""
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(f"    {line[:300]}" for line in lines) or "    (it said nothing)"


def _wait(
    peer: Peer, process: subprocess.Popen[bytes], url: str, log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while True:
        if process.poll() is not None:
            raise KVBoostError(
                f"{peer.name} ended with {process.returncode} instead of getting ready:\n"
                f"{tail(log)}"
            )
        try:
            with _NO_PROXY.open(url + peer.ready_path, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not yet
        if time.monotonic() > deadline:
            raise KVBoostError(f"{peer.name} was not ready after {timeout:.0f} s:\n{tail(log)}")
        time.sleep(0.2)


def _served_model(url: str) -> str:
    with _NO_PROXY.open(f"{url}/v1/models", timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def signal_group(group: int, number: int) -> bool:
    """Whether there was anyone to tell."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that whoever started a server stops it."""
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
