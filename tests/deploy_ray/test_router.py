"""The request router of Ray Serve: ranks by content, learns from reports, needs no own types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvboost.deploy.ray.router import ContentRouter
from kvboost.deploy.router import Known
from passages import of, text


def replica(name: str, **stats: object) -> SimpleNamespace:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), routing_stats=stats)


def pending(number: int, argument: object) -> SimpleNamespace:
    metadata = SimpleNamespace(internal_request_id=str(number))
    return SimpleNamespace(args=[argument, b"body"], metadata=metadata)


@pytest.fixture
def router() -> ContentRouter:
    """Without Serve around it."""
    made = object.__new__(ContentRouter)
    made._replica_queue_len_cache = SimpleNamespace(get=lambda _: None)
    made.initialize_state(policy="content", remember=1 << 16)
    return made


def choose(router: ContentRouter, replicas, request) -> list[str]:
    ranks = asyncio.run(router.choose_replicas(replicas, request))
    return [one.replica_id.unique_id for (one,) in ranks]


def test_a_document_goes_back_and_every_replica_has_a_rank(router) -> None:
    replicas = [replica("a"), replica("b")]
    first = {}
    for number in range(6):
        request = pending(number, of(text(number)))
        first[number], _ = choose(router, replicas, request)
        chosen = SimpleNamespace(unique_id=first[number])
        router.on_request_routed(request, chosen, None)
        router.on_request_completed(chosen, str(number))
    assert sorted(first.values()) == ["a"] * 3 + ["b"] * 3
    for number in first:
        again = pending(9, of(f"other words {text(number)}"))
        assert choose(router, replicas, again)[0] == first[number]


def test_reports_of_replicas_count_and_dead_replicas_do_not(router) -> None:
    known = Known(1 << 16)
    known.add(of(text(1)))
    report = {"number": 1, "marks": known.marks.newest(8192), "blocks": known.blocks.newest(2048)}
    replicas = [replica("a"), replica("b", **report)]
    asked = pending(1, of(f"x {text(1)}"))
    assert choose(router, replicas, asked)[0] == "b"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ray.serve.request_router.RequestRouter.on_replica_actor_died", lambda *_: None
        )
        router.on_replica_actor_died(SimpleNamespace(unique_id="b"))
    assert choose(router, [replica("a"), replica("b")], asked)[0] == "a"


def test_a_sketch_is_known_by_its_attributes(router) -> None:
    """Serve may pickle modules by value, and a class is then another class."""
    sketch = of(text(1))
    twin = SimpleNamespace(**{name: getattr(sketch, name) for name in sketch.__dataclass_fields__})
    request = pending(1, twin)
    chosen = SimpleNamespace(unique_id=choose(router, [replica("a"), replica("b")], request)[0])
    router.on_request_routed(request, chosen, None)
    assert router._scores.known(chosen.unique_id).tokens > 0
    assert choose(router, [replica("a"), replica("b")], None) != []
    assert router._scores.open_requests(chosen.unique_id) == 1
    router.on_request_completed(chosen, "1")
    assert router._scores.open_requests(chosen.unique_id) == 0
