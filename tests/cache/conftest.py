"""Servers for the tests of remote stores, and a prompt that is stored already."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from kvboost import GenerationMode
from support.planting import PROMPT, remote
from support.redis_server import RedisServer, started_redis
from support.tiny import make_engine, tiny_model

pytest.register_assert_rewrite("support.remote_stores")  # so that what differs is shown


@pytest.fixture(scope="module")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    yield from started_redis(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def server(running_server: RedisServer) -> RedisServer:
    """Empty and without limits."""
    running_server.client.flushall()
    running_server.client.script_flush()
    running_server.client.config_set("maxmemory", 0)
    running_server.client.config_set("maxmemory-policy", "noeviction")
    return running_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that may be stopped."""
    yield from started_redis(tmp_path)


@pytest.fixture(params=["redis", "folder", "memory", "async"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty store of each kind."""
    if request.param == "redis":
        yield request.getfixturevalue("server").url
    elif request.param == "memory":
        yield f"memory://{tmp_path.name}"
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        (tmp_path / "shared").mkdir()
        yield {"folder": "", "async": "asyncfolder://"}[request.param] + str(tmp_path / "shared")


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A place whose cache folder and remote store hold ``PROMPT``, and the plain answer to it."""
    place = tmp_path_factory.mktemp("written")
    options = {"disk_cache_dir": place / "kv", "gpu_cache_bytes": 0, **remote(place)}
    with make_engine(tiny_model("llama"), **options) as engine:
        engine.generate(PROMPT, 4, GenerationMode.PREFIX_CACHE)
        return place, engine.generate(PROMPT, 4, GenerationMode.BASELINE).token_ids


@pytest.fixture
def expected(written: tuple[Path, list[int]], tmp_path: Path) -> list[int]:
    """The plain answer to ``PROMPT``, which this test's folder and remote store hold."""
    place, answer = written
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    return answer
