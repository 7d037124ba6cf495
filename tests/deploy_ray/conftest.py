"""Ray Serve on this machine: two replicas of the real application, and a Redis of the tests'.

These tests need an environment with Ray; ``make test-ray`` makes one and runs them there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("KVBOOST_TEST_RAY") else ["test_*.py"]

KEYS = "ann:k-ann,bob:k-bob"
VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "2",
    "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "10",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else a busy machine gets no proxy
    "KVBOOST_API_KEYS": KEYS,
}


def pytest_configure(config: pytest.Config) -> None:
    """Ray warns about itself."""
    config.addinivalue_line("filterwarnings", "ignore")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from support.redis_server import started_redis

    for server in started_redis(tmp_path_factory.mktemp("redis")):
        yield server.url


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """Serve on a free port, without an application."""
    os.environ.update(VARIABLES)
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(__file__).parents[2] / "src"
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200_000_000,
        runtime_env={"env_vars": {**VARIABLES, "PYTHONPATH": str(folder)}},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()
