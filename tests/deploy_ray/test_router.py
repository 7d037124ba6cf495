"""The request router of Ray Serve: ranks by content, learns from reports, needs no own types."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from kvboost.deploy.ray.replica import Progress
from kvboost.deploy.ray.router import ContentRouter
from kvboost.deploy.router import Known
from support.passages import of, text


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
    assert router.scores.known(chosen.unique_id).tokens > 0
    assert choose(router, [replica("a"), replica("b")], None) != []
    assert router.scores.open_requests(chosen.unique_id) == 1
    router.on_request_completed(chosen, "1")
    assert router.scores.open_requests(chosen.unique_id) == 0


def test_the_application_is_two_deployments_with_our_router_and_our_scaling() -> None:
    from kvboost.deploy import app

    given = {"replicas": "1", "max_replicas": "3", "fronts": "2"}  # as a command line has them
    built = app({**given, "policy": "beginning", "remember": 640})
    front = built._bound_deployment
    (replica,) = (one._bound_deployment for one in front.init_args)
    config = replica._deployment_config
    assert (front.name, front.num_replicas) == ("Front", 2)
    assert replica.name == "Replica" and config.autoscaling_config.max_replicas == 3
    assert config.request_router_config.request_router_kwargs == {
        "policy": "beginning",
        "remember": 640,
    }
    assert config.request_router_config.get_request_router_class() is ContentRouter
    idle = {"kv_used": {"a": 0.0, "b": 0.1}, "waiting": {"a": 0.0, "b": 0.0}}
    context = SimpleNamespace(
        current_num_replicas=2,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
        aggregated_metrics=idle,
    )
    assert config.autoscaling_config.policy.get_policy()(context) == (1, {})
    drained = front._deployment_config.graceful_shutdown_timeout_s
    assert drained == config.graceful_shutdown_timeout_s == 60


def test_an_engine_that_takes_no_step_is_noticed() -> None:
    progress = Progress(0.0)
    assert not progress.stalled(True, 1, 100.0)
    assert not progress.stalled(True, 1, 200.0)
    assert progress.stalled(True, 1, 221.0)
    assert not progress.stalled(True, 2, 300.0)
    assert not progress.stalled(False, 2, 900.0)
