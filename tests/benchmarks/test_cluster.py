"""The cluster benchmark's clients before two real servers of a tiny model."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from itertools import islice

import pytest

from benchmarks.cluster import Killed, Traffic, _note, forget, kill_one, load, references
from kvboost.bench.peers.process import Running
from support.live_server import live_router, live_server
from support.passages import WORDS, text
from support.tiny import make_engine, tiny_model


@pytest.fixture
def traffic() -> Traffic:
    return Traffic([text(number, 40) for number in range(4)], 0, WORDS)


@pytest.fixture
def servers():
    """Two servers and a router by content."""
    with ExitStack() as stack:
        engines = [make_engine(tiny_model("llama", max_position_embeddings=4096)) for _ in range(2)]
        for engine in engines:
            stack.enter_context(engine)
        made = [
            stack.enter_context(live_server(engine, served_names=("tiny",))) for engine in engines
        ]
        router = stack.enter_context(live_router(*(server.url for server in made)))
        yield (
            [Running(server.url, "tiny", 0, 0.0) for server in made],
            Running(router.url, "tiny", 0, 0.0),
        )


def test_traffic_is_the_same_for_every_policy_and_moves_documents(traffic) -> None:
    first, second = (list(islice(traffic.prompts(), 40)) for _ in range(2))
    assert first == second
    asked = [next(one for one in traffic.documents if one in prompt) for prompt in first]
    assert asked.count(traffic.documents[0]) > asked.count(traffic.documents[3])
    assert len({prompt[:20] for prompt in first}) == 40


def test_what_servers_report_is_added_up_and_forgotten(servers, traffic) -> None:
    ours, route = servers
    served = asyncio.run(load(route, traffic.prompts(), 12, "salt", lambda: None))
    assert not served.failures and sum(served.by_server.values()) == 12
    assert 0.1 < served.share < 1.0
    asyncio.run(forget(ours, "salt"))
    again = asyncio.run(load(ours[0], traffic.prompts(), 0, "salt", lambda: None))
    assert again.prompt_tokens == 0


def test_right_answers_are_told_from_wrong_ones_around_the_kill(servers, traffic) -> None:
    ours, route = servers
    prompts = list(islice(traffic.prompts(), 2))
    right = asyncio.run(references(ours[0], prompts))
    kills: list[int] = []
    seen = asyncio.run(kill_one(route, right, 9, lambda: kills.append(1), lambda: None))
    assert kills == [1] and seen.right == 9 and seen.after > 0 and not seen.problems
    lie = dict.fromkeys(prompts, "something else")
    seen = asyncio.run(kill_one(route, lie, 4, lambda: None, lambda: None))
    assert len(seen.wrong) == 4 and len(seen.problems) >= 4


def test_outcomes_are_judged() -> None:
    seen = Killed()
    outcomes = ("right", "HTTP 503", "event upstream_lost", "HTTP 500", "the connection closed")
    for outcome in outcomes:
        _note(seen, outcome, after=True)
    assert seen.right == seen.after == 1 and sum(seen.retryable.values()) == 2
    assert [problem.split(": ")[1] for problem in seen.problems] == list(outcomes[3:])
