"""Overload with tools and schemas: a short form, against a real server over a tiny model."""

from __future__ import annotations

import asyncio
import os

import httpx

from benchmarks import overload as script
from kvboost import EngineConfig, KVBoost
from kvboost.bench.peers.process import Running
from kvboost.serve.settings import parse_keys
from support.live_server import live_server
from support.tiny import byte_tokenizer, tiny_model

KEY = {"x-api-key": script.CROWD}


def test_every_request_is_answered_right_or_refused() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    keys = parse_keys(script.KEYS, "the script")
    config = EngineConfig(max_running=2, max_waiting=2, speculate="off")
    with (
        KVBoost.from_model(model, byte_tokenizer(), config=config) as engine,
        live_server(engine, served_names=("tiny",), keys=keys) as server,
    ):
        requests = script.make_requests("tiny", ["A short text."], max_tokens=120)
        for request in requests:
            for body in script.wrong_bodies(request):
                where = f"{server.url}{request.path}"
                refused = httpx.post(where, json=body, headers=KEY, trust_env=False)
                assert refused.status_code == 400, (request.kind, refused.text)
        where = Running(server.url, "tiny", os.getpid(), 0.0)
        load = script.overload(where, requests, clients=8, seconds=0.1, least=10, pause=0.2)
        seen = asyncio.run(load)
        assert engine.check_integrity() == []
    assert seen.problems == []
    assert seen.outcomes["refused"] > 0 and seen.outcomes["wrong: 400"] > 0
    assert seen.outcomes["answered: light"] > 0 and len(seen.seconds["light, idle"]) == 3
    assert seen.compared >= 10 and seen.validated > 0
    assert set(seen.finished) <= {"stop", "length", "cancelled"}


def test_what_must_not_be_after_a_load() -> None:
    def seen(memory: list[float], files: tuple[int, int], light: float) -> list[str]:
        seconds = {"light, idle": [0.1], "light": [light], "crowd": [2.0]}
        found = script.Seen(memory_mb=memory, open_files=files, seconds=seconds)
        script.judge(found)
        return found.problems

    assert seen([100.0, 106.0, 101.0], (20, 20), 1.0) == []
    assert len(seen([100.0, 102.0, 110.0], (20, 40), 3.0)) == 3
