"""The scheduler's side of the connector, without vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvboost.integrations.vllm.later import MANY, USELESS
from support.connectors import PAGE, Scheduler, connector

__all__ = ["connector"]


def text(seed: int, length: int = 200) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(0, 50_000, length).tolist()
    return found


def crowd(scheduler: Scheduler, ended: int = USELESS) -> list[Any]:
    """Requests that go on, after so many useless ones have ended beside them."""
    staying = [scheduler.begin(f"staying {n}", text(10_000 + n)) for n in range(MANY - 1)]
    for number in range(ended):
        scheduler.end(scheduler.begin(f"useless {number}", text(number)))
    scheduler.step(1)
    return staying


def leave(scheduler: Scheduler, requests: list[Any]) -> None:
    for request in requests:
        scheduler.connector._served.pop(request.request_id)


def put_off(scheduler: Scheduler, seed: int, salt: str | None = None) -> Any:
    """A request that has ended and was put off."""
    while True:
        request = scheduler.begin(f"request {seed}", text(seed), salt)
        before = len(scheduler.connector._later)
        scheduler.end(request)
        if len(scheduler.connector._later) > before:
            return request
        seed += 100_000


def outcomes(scheduler: Scheduler) -> dict[str, int]:
    stats = scheduler.connector.get_kv_connector_stats()
    return {} if stats is None else stats.data.get("put_off", {})


@pytest.fixture
def scheduler(connector: Any, monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(connector.Stats, "__init__", lambda self, data: setattr(self, "data", data))
    return Scheduler(connector)


def test_a_request_is_kept_when_it_ends(scheduler: Scheduler) -> None:
    request = scheduler.begin("a", text(1))
    pages = scheduler.end(request)
    (keep,) = scheduler.step().keeps
    assert keep.pages == tuple(pages)
    assert sum(info.num_tokens for info in keep.infos) == 200
    assert scheduler.known(scheduler.begin("b", text(1) + text(2))) == 200 // PAGE * PAGE


def test_it_is_put_off_in_a_crowd_and_kept_when_that_has_gone(scheduler: Scheduler) -> None:
    staying = crowd(scheduler)
    request = put_off(scheduler, 50_000)
    assert not scheduler.step(1).keeps and not scheduler.step(1).keeps
    again = scheduler.begin("again", request.prompt_token_ids + text(90_000))
    assert scheduler.known(again) == 0
    leave(scheduler, [*staying, again])
    pages = [scheduler.pool.pages[one] for one in request.block_hashes]
    (keep,) = scheduler.step().keeps
    assert keep.pages == tuple(pages)
    assert sum(info.num_tokens for info in keep.infos) == 200 // PAGE * PAGE
    assert outcomes(scheduler) == {"kept": 1}


def test_beside_others_it_is_kept_with_the_next_step(scheduler: Scheduler) -> None:
    """vLLM names pages when it schedules them: this step may be about to compute them."""
    staying = crowd(scheduler)
    put_off(scheduler, 50_000)
    leave(scheduler, staying[1:])
    assert not scheduler.step(1).keeps
    assert len(scheduler.step(1).keeps) == 1


def test_what_the_prefix_cache_has_lost_is_dropped(scheduler: Scheduler) -> None:
    staying = crowd(scheduler)
    put_off(scheduler, 50_000)
    leave(scheduler, staying)
    scheduler.pool.pages.clear()
    assert not scheduler.step().keeps
    assert outcomes(scheduler) == {"dropped": 1}


def test_a_load_ends_it(scheduler: Scheduler) -> None:
    crowd(scheduler)
    put_off(scheduler, 50_000)
    request = scheduler.begin("useful", text(0) + text(4))
    rows = scheduler.known(request)
    assert rows
    pages = [list(range(900, 950))]

    class Blocks:
        def get_block_ids(self) -> list[list[int]]:
            return pages

    scheduler.connector.update_state_after_alloc(request, Blocks(), rows)
    assert len(scheduler.step(1).loads) == 1
    assert len(scheduler.step(1).keeps) == 1  # what was put off
    scheduler.end(scheduler.begin("next", text(60_000)))
    assert len(scheduler.step(1).keeps) == 1


def test_what_is_forgotten_or_reset_is_not_kept_later(scheduler: Scheduler) -> None:
    staying = crowd(scheduler)
    put_off(scheduler, 50_000, "mine")
    other = put_off(scheduler, 60_000, "yours")
    command = scheduler.begin("command", [1], "mine", forget="everything")
    leave(scheduler, [*staying, command])
    (keep,) = scheduler.step().keeps
    assert keep.infos[0].token_ids.tolist() == other.prompt_token_ids[: 200 // PAGE * PAGE]
    crowd(scheduler)
    put_off(scheduler, 70_000)
    scheduler.connector.reset_cache()
    assert not len(scheduler.connector._later)
    scheduler.connector.shutdown()


def test_nothing_is_put_off_where_others_read_what_is_kept(connector: Any, tmp_path: Path) -> None:
    scheduler = Scheduler(connector, disk_cache_dir=str(tmp_path / "chunks"))
    crowd(scheduler)
    scheduler.end(scheduler.begin("one", text(50_000)))
    scheduler.end(scheduler.begin("another", text(50_001)))
    assert len(scheduler.step(1).keeps) == 2
    scheduler.connector.shutdown()
