"""Overload with tools and schemas: a short form, against a real server over a tiny model."""

from __future__ import annotations

import asyncio
import os

from kvboost import EngineConfig, KVBoost
from kvboost.bench.peers.process import Running
from live_server import live_server
from load_script import load_script
from tiny import byte_tokenizer, tiny_model

script = load_script("bench_overload")


def test_every_request_is_answered_right_or_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    config = EngineConfig(max_running=2, max_waiting=1, speculate="off")
    with (
        KVBoost.from_model(model, byte_tokenizer(), config=config) as engine,
        live_server(engine, served_names=("tiny",)) as server,
    ):
        requests = script.make_requests("tiny", ["A short text."], max_tokens=120)
        where = Running(server.url, "tiny", os.getpid(), 0.0)
        load = script.overload(where, requests, clients=6, seconds=0.1, least=10, pause=0.2)
        seen = asyncio.run(load)
        assert engine.check_integrity() == []
    assert seen.problems == []
    assert seen.outcomes["refused"] > 0 and seen.outcomes["wrong: 400"] > 0
    assert seen.compared >= 10 and seen.validated > 0
    assert set(seen.finished) <= {"stop", "length", "cancelled"}
