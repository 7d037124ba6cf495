"""Servers for the tests of remote stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.redis_server import RedisServer, started_redis

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
