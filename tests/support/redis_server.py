"""A real server of the test's own."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

MISSING = None if shutil.which("redis-server") else "redis-server is not installed: make services"


class RedisServer:
    """On a socket in ``folder``, where nothing else can be met; keeps nothing when it ends."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "redis.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self._socket}"
        self.client = redis.Redis.from_url(self.url, socket_timeout=60)
        """Past the tier, to look at what is there and to break it."""

    def start(self, *options: str) -> None:
        assert self._process is None
        command = ["redis-server", "--port", "0", "--unixsocket", str(self._socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._socket.parent)]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while True:
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server ended by itself"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def stall(self) -> None:
        """It is there and takes connections, but answers nothing until :meth:`go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._socket.unlink(missing_ok=True)
        self.client.connection_pool.disconnect()

    def close(self) -> None:
        self.stop()
        self.client.close()


def started_redis(folder: Path) -> Iterator[RedisServer]:
    """For a fixture: a server until the generator is closed. Skips the test if there is none."""
    if MISSING is not None:
        pytest.skip(MISSING)
    server = RedisServer(folder)
    server.start()
    yield server
    server.close()
