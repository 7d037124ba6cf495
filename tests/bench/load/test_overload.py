"""The command's short form: bad clients against a real server over a tiny model."""

from __future__ import annotations

import asyncio
import os
from itertools import cycle

from kvboost.bench.kit.memory import levels, resident_mb
from kvboost.bench.load.overload import Overload, check_rest, overload
from kvboost.bench.load.serve.users import Request
from kvboost.bench.peers.process import Running
from live_server import live_server
from tiny import make_engine, tiny_model


def test_a_short_overload_finds_no_problem() -> None:
    prompts = [
        Request("short", ({"role": "user", "content": f"{text} " * (20 + 3 * number)},))
        for number, text in enumerate(["one and the same", "another", "and a third one"])
    ]
    seen = Overload()
    with (
        make_engine(tiny_model("llama", max_position_embeddings=1024), max_waiting=4) as engine,
        live_server(engine, served_names=("tiny",)) as server,
    ):
        where = Running(server.url, "tiny", os.getpid(), 0.0)
        load = overload(where, cycle(prompts), 40.0, 6.0, seen, least_clients=150)
        asyncio.run(load)
        asyncio.run(check_rest(where, seen))
        assert engine.check_integrity() == []
    assert seen.problems == []
    assert sum(seen.outcomes.values()) >= 150
    assert seen.outcomes["answered: 200"] > 20 and seen.outcomes["left"] > 5
    assert seen.outcomes["malformed: 400"] > 0
    assert set(seen.finished) <= {"stop", "length", "cancelled"}


def test_memory_is_judged_by_medians_over_time() -> None:
    samples = [100.0] * 50 + [500.0] + [110.0] * 49
    assert levels(samples) == (100.0, 110.0, 110.0)
    assert levels([7.0]) == (7.0, 7.0, 7.0)
    assert resident_mb() > 10
