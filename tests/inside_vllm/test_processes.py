"""Engines in processes of their own, with one folder and one Redis server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.redis_server import RedisServer, started_redis

SMALL = {"max_cache_bytes": 8 << 20}
"""Room for one chunk: whatever else is reused comes from a slow tier."""


class Process:
    def __init__(self, **extra: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.one_vllm_engine", json.dumps(extra)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._answer()

    def ask(self, *order: int, mode: object = "exact", fresh: bool = True) -> dict[str, Any]:
        assert self._process.stdin is not None
        asked = {"order": order, "mode": mode, "fresh": fresh}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        assert self._process.wait() == 0

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ANSWER "):
                answer: dict[str, Any] = json.loads(line.removeprefix("ANSWER "))
                return answer
        raise AssertionError("the engine has ended")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from started_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def start(**extra: Any) -> Process:
        started.append(Process(**extra))
        return started[-1]

    yield start
    for process in started:
        process.close()


@pytest.fixture(scope="module")
def first(folder: Path, server: RedisServer) -> dict[str, Any]:
    """The answer of an engine that has read the prompt, and has written it to both."""
    process = Process(disk_cache_dir=str(folder), remote_cache_url=server.url)
    answer = process.ask(0, 1, 2)
    process.close()
    assert answer["cached"] == 0 and answer["usage"] is None
    return answer


def test_another_process_loads_what_the_first_has_written(
    first: dict[str, Any], folder: Path, start: Callable[..., Process]
) -> None:
    other = start(disk_cache_dir=str(folder), **SMALL)
    answer = other.ask(0, 1, 2)
    assert answer["tokens"] == first["tokens"]
    assert answer["usage"]["exact_tokens"] == answer["cached"] > 0.85 * 900
    # Damaged files are computed, and put aside. One of the two may be in memory, and is found to be
    # damaged with the next request.
    files = sorted(folder.glob("??/*.safetensors"), key=lambda path: path.stat().st_size)
    for path in files[-2:]:
        path.write_bytes(path.read_bytes()[:-64])
    answer = other.ask(0, 1, 2)
    assert answer["tokens"] == first["tokens"]
    assert answer["usage"]["exact_tokens"] == 0
    assert list((folder / "quarantine").iterdir())
    assert other.ask(0, 1, 2)["tokens"] == first["tokens"]
    # They were written again.
    answer = other.ask(0, 1, 2)
    assert answer["tokens"] == first["tokens"] and answer["usage"]["exact_tokens"] > 0.85 * 900


def test_an_engine_without_a_folder_loads_from_redis_and_outlives_it(
    first: dict[str, Any], server: RedisServer, start: Callable[..., Process]
) -> None:
    other = start(remote_cache_url=server.url, **SMALL)
    answer = other.ask(0, 1, 2)
    assert answer["tokens"] == first["tokens"]
    # Redis is asked by key: the last chunk goes on with an answer, and so has another one.
    assert answer["usage"]["exact_tokens"] == answer["cached"] == 512
    server.stop()
    answer = other.ask(0, 1, 2)
    assert answer["tokens"] == first["tokens"]
    assert other.ask(1, 0, mode="off")["cached"] == 0
