"""``kvboost serve --kv-events``: a router knows what the server holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from support.kv_events import Subscriber
from support.server_process import ServerProcess
from support.tiny import save_tiny

BLOCK = 32


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    save_tiny(tmp_path / "tiny", vocab_size=7000, max_position_embeddings=512)
    arguments = ("-m", str(tmp_path / "tiny"), "--kv-events", f"ipc://{tmp_path}/events")
    arguments += ("--kv-events-block", str(BLOCK))
    with ServerProcess(*arguments, "--kv-events-topic", "kv@e2e@m", folder=tmp_path) as running:
        yield running


def read(server: ServerProcess, ids: list[int], **more: object) -> None:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 1, **more}
    reply = httpx.post(f"{server.url}/completions", json=body, timeout=300)
    assert reply.status_code == 200, reply.text


def test_a_router_follows_a_server(server: ServerProcess, tmp_path: Path) -> None:
    router = Subscriber(f"ipc://{tmp_path}/events", "kv@")
    fresh = count(1000)
    router.join(lambda: read(server, [next(fresh)] * BLOCK))
    text, secret = list(range(5000, 5160)), list(range(6000, 6160))
    read(server, secret, cache_salt="mine")
    read(server, text)
    router.listen_until(lambda router: tuple(text) in router.texts)
    told = {token for event in router.events for token in event.get("token_ids", ())}
    assert set(text) <= told and not set(secret) & told
    assert router.topics == {b"kv@e2e@m"}

    metrics = httpx.get(f"{server.root}/metrics").text
    (blocks,) = re.findall(r"^kvboost_kv_events_blocks (\S+)$", metrics, re.M)
    assert float(blocks) >= len(router.blocks)  # it may have missed some before it joined
    assert "kvboost_kv_events_dropped_total 0.0" in metrics

    forgotten = httpx.post(f"{server.root}/kvboost/forget", json={"cache_salt": ""})
    assert forgotten.status_code == 200 and forgotten.json()["forgotten"] >= 2, forgotten.text
    router.listen_until(lambda router: not router.blocks)
    read(server, text)
    router.listen_until(lambda router: tuple(text) in router.texts)

    server.terminate()
    router.listen_until(lambda router: not router.blocks)
    assert router.events[-1] == {"type": "AllBlocksCleared"}
    assert server.wait() == 0
    router.close()
