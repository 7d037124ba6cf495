"""The scheduler's side of the connector, without vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvboost.integrations.vllm.later import MANY, USELESS
from kvboost.integrations.vllm.planner import Hello
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
        scheduler.connector.served.pop(request.request_id)


def put_off(scheduler: Scheduler, seed: int, salt: str | None = None) -> Any:
    """A request that has ended and was put off."""
    while True:
        request = scheduler.begin(f"request {seed}", text(seed), salt)
        before = len(scheduler.connector.keeping.later)
        scheduler.end(request)
        if len(scheduler.connector.keeping.later) > before:
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
    assert keep.tables == (tuple(pages),)
    assert sum(info.num_tokens for info in keep.infos) == 200
    assert scheduler.known(scheduler.begin("b", text(1) + text(2))) == 200 // PAGE * PAGE


def test_a_request_without_some_of_its_pages_is_not_kept(scheduler: Scheduler) -> None:
    """Of attention to some places, vLLM frees pages between those that it keeps."""
    request = scheduler.begin("a", text(1))
    scheduler.connector.request_finished(request, [1, 2, 0, 0, *range(5, 14)])
    assert not scheduler.step().keeps
    assert scheduler.known(scheduler.begin("b", text(1) + text(2))) == 0


def test_it_is_put_off_in_a_crowd_and_kept_when_that_has_gone(scheduler: Scheduler) -> None:
    staying = crowd(scheduler)
    request = put_off(scheduler, 50_000)
    assert not scheduler.step(1).keeps and not scheduler.step(1).keeps
    again = scheduler.begin("again", request.prompt_token_ids + text(90_000))
    assert scheduler.known(again) == 0
    leave(scheduler, [*staying, again])
    pages = [scheduler.pool.pages[one] for one in request.block_hashes]
    (keep,) = scheduler.step().keeps
    assert keep.tables == (tuple(pages),)
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
    pages = list(range(900, 950))
    scheduler.connector.update_state_after_alloc(request, Blocks(pages), rows)
    assert len(scheduler.step(1).loads) == 1
    assert len(scheduler.step(1).keeps) == 1  # what was put off
    scheduler.end(scheduler.begin("next", text(60_000)))
    assert len(scheduler.step(1).keeps) == 1


def test_a_load_that_vllm_does_without_leaves_nothing_behind(connector: Any) -> None:
    scheduler = Scheduler(connector, chunk_size=64, reuse_moved="always", recompute_ratio=0.0)
    scheduler.end(scheduler.begin("a", text(1)))
    scheduler.step()
    request = scheduler.begin("b", text(2) + text(1) + text(3))
    hashes = list(request.block_hashes)
    assert scheduler.known(request) and request.block_hashes != hashes  # its pages were approximate
    scheduler.connector.update_state_after_alloc(request, Blocks([]), 0)
    assert request.block_hashes == hashes and not scheduler.step().loads
    scheduler.end(request)
    (keep,) = scheduler.step().keeps
    assert sum(info.num_tokens for info in keep.infos) == 600


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
    assert not len(scheduler.connector.keeping.later)
    scheduler.connector.shutdown()


def test_rows_that_were_computed_before_a_reset_are_not_kept(scheduler: Scheduler) -> None:
    running, waiting = scheduler.begin("a", text(1)), scheduler.begin("b", text(2))
    waiting.num_computed_tokens = 0
    scheduler.connector.reset_cache()
    waiting.num_computed_tokens = waiting.num_prompt_tokens
    scheduler.end(running)
    pages = scheduler.end(waiting)
    assert [keep.tables for keep in scheduler.step().keeps] == [(tuple(pages),)]


def test_nothing_is_put_off_where_others_read_what_is_kept(connector: Any, tmp_path: Path) -> None:
    scheduler = Scheduler(connector, disk_cache_dir=str(tmp_path / "chunks"))
    crowd(scheduler)
    scheduler.end(scheduler.begin("one", text(50_000)))
    scheduler.end(scheduler.begin("another", text(50_001)))
    assert len(scheduler.step(1).keeps) == 2
    scheduler.connector.shutdown()


# Models with windows.

WINDOW = 48


@pytest.fixture
def windowed(connector: Any) -> Scheduler:
    return Scheduler(connector, (None, WINDOW), chunk_size=64, reuse_moved="always")


class Blocks:
    def __init__(self, *tables: list[int]) -> None:
        self._tables = tables

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self._tables


def tables(start: int, rows: int) -> tuple[list[int], list[int]]:
    """Pages for so many rows in two groups."""
    pages = list(range(start, start + -(-rows // PAGE)))
    return pages, [page + 1000 for page in pages]


def read(scheduler: Scheduler, name: str, ids: list[int]) -> list[Any]:
    """A request that is read at once and ends; returns what is kept of it."""
    request = scheduler.begin(name, ids)
    scheduler.step(len(ids), new={name: (tables(1, len(ids)), 0)})
    scheduler.end(request)
    return list(scheduler.step().keeps)


def report(scheduler: Scheduler, connector: Any, **said: Any) -> None:
    output = {"kv_connector_worker_meta": connector.Report(**said), "finished_recving": None}
    scheduler.connector.update_connector_output(SimpleNamespace(**output))


def test_rows_are_kept_before_they_leave_a_window(windowed: Scheduler) -> None:
    ids = text(1, 200)
    windowed.begin("a", ids)
    pages, others = tables(1, 100)
    assert not windowed.step(100, new={"a": ((pages, others), 0)}).keeps
    more = list(range(50, 56)), list(range(1050, 1056))
    (keep,) = windowed.step(90, running={"a": (more, 100)}).keeps
    assert keep.first == 0 and not keep.earlier
    assert [(info.base_position, info.end) for info in keep.infos] == [(0, 64), (64, 100)]
    assert keep.tables == (tuple(pages + more[0]), tuple(others + more[1]))
    (keep,) = windowed.step(1, running={"a": (None, 190)}).keeps
    assert keep.first == 100  # the chunk grows: its first rows are stored, and were not computed
    assert [(info.base_position, info.end) for info in keep.infos] == [(64, 128), (128, 190)]
    (earlier,) = keep.earlier
    assert (earlier.start, earlier.end) == (64, 100)


def test_what_is_left_is_kept_when_a_request_ends(windowed: Scheduler) -> None:
    (keep,) = read(windowed, "a", text(1, 150))
    assert sum(info.num_tokens for info in keep.infos) == 150 and keep.first == 0


def wait_for_chunks(scheduler: Scheduler) -> tuple[Any, Callable[..., Any]]:
    """A request whose chunks are on their way, and what vLLM asks about it again."""
    ids = text(1, 150)
    read(scheduler, "a", ids)
    request = scheduler.begin("b", ids + text(2, 50))
    matched = scheduler.connector.get_num_new_matched_tokens
    assert matched(request, 0) == (None, False)
    return request, matched


def test_a_load_begins_when_its_chunks_are_held(windowed: Scheduler, connector: Any) -> None:
    request, matched = wait_for_chunks(windowed)
    (load,) = windowed.step().fetches
    assert matched(request, 0) == (None, False) and not windowed.step().fetches
    report(windowed, connector, fetched={("b", 0)})
    assert matched(request, 0) == (144, True)
    pages, others = tables(1, 200)
    others[:6] = [0] * 6  # these rows have left the window
    windowed.connector.update_state_after_alloc(request, Blocks(pages, others), 144)
    (sent,) = windowed.step().loads
    assert sent.tables == (tuple(pages[:9]), tuple(others[:9])) and sent.infos == load.infos


def test_requests_wait_while_much_is_held_for_others(
    windowed: Scheduler, connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "HELD_ROWS", 200)
    ids = text(1, 150)
    read(windowed, "a", ids)
    requests = [windowed.begin(name, ids + text(2, 50)) for name in "bcd"]
    matched = windowed.connector.get_num_new_matched_tokens
    for request in requests:
        assert matched(request, 0) == (None, False)
    assert [load.request_id for load in windowed.step().fetches] == ["b", "c"]
    report(windowed, connector, fetched={("b", 0), ("c", 0)})
    assert matched(requests[0], 0) == (144, True)
    windowed.connector.update_state_after_alloc(requests[0], Blocks(*tables(1, 200)), 144)
    assert matched(requests[2], 0) == (None, False)
    assert [load.request_id for load in windowed.step().fetches] == ["d"]
    windowed.end(requests[1])
    windowed.end(requests[2])
    assert windowed.connector.held_rows == 0


def test_a_load_that_fails_is_not_begun(windowed: Scheduler, connector: Any) -> None:
    request, matched = wait_for_chunks(windowed)
    report(windowed, connector, failed={("b", 0)})
    assert matched(request, 0) == (0, False) and not windowed.step().loads


def test_what_failed_is_the_load_that_is_meant(windowed: Scheduler, connector: Any) -> None:
    request, matched = wait_for_chunks(windowed)
    windowed.step()
    assert matched(request, 32) == (None, False)  # vLLM has found rows of it
    report(windowed, connector, failed={("b", 0)})  # of the load before
    assert matched(request, 32) == (None, False)
    report(windowed, connector, fetched={("b", 32)})
    assert matched(request, 32) == (112, True)
    windowed.connector.update_state_after_alloc(request, Blocks(*tables(1, 200)), 112)
    report(windowed, connector, failed={("b", 0)})
    output = {"kv_connector_worker_meta": None, "finished_recving": {"b"}}
    windowed.connector.update_connector_output(SimpleNamespace(**output))
    _, said = windowed.connector.request_finished_all_groups(request, tables(1, 200))
    assert said == {"kvboost": {"exact_tokens": 112, "moved_tokens": 0, "recomputed_tokens": 0}}


def test_chunks_are_let_go_when_another_load_is_needed(windowed: Scheduler, connector: Any) -> None:
    request, matched = wait_for_chunks(windowed)
    assert len(windowed.step().fetches) == 1
    report(windowed, connector, fetched={("b", 0)})
    assert matched(request, 32) == (None, False)  # vLLM has found rows of it
    step = windowed.step()
    assert step.cancelled == ["b"] and [load.first for load in step.fetches] == [32]
    report(windowed, connector, fetched={("b", 0)})  # of the load before
    assert matched(request, 32) == (None, False)
    report(windowed, connector, fetched={("b", 32)})
    assert matched(request, 32) == (112, True)
    windowed.end(request)
    assert windowed.step().cancelled == ["b"]


def test_chunks_that_wait_for_pages_are_let_go_by_a_reset(
    windowed: Scheduler, connector: Any
) -> None:
    """Weights may have changed: rows of those before must not be loaded."""
    request, matched = wait_for_chunks(windowed)
    windowed.step()
    report(windowed, connector, fetched={("b", 0)})
    windowed.connector.reset_cache()
    assert matched(request, 0) == (0, False)
    assert windowed.step().cancelled == ["b"]


def test_chunks_of_a_load_that_vllm_does_without_are_let_go(
    windowed: Scheduler, connector: Any
) -> None:
    request, matched = wait_for_chunks(windowed)
    windowed.step()
    report(windowed, connector, fetched={("b", 0)})
    assert matched(request, 0) == (144, True)
    windowed.connector.update_state_after_alloc(request, Blocks([], []), 0)
    step = windowed.step()
    assert step.cancelled == ["b"] and not step.loads and windowed.connector.held_rows == 0


def test_what_follows_rows_that_nobody_has_is_not_kept(windowed: Scheduler) -> None:
    ids = text(1, 150)
    request = windowed.begin("a", ids)  # vLLM's own cache has its beginning
    pages, others = tables(1, 150)
    others[:4] = [0] * 4
    assert not windowed.step(40, new={"a": ((pages, others), 112)}).keeps
    windowed.end(request)
    assert not windowed.step().keeps


def test_what_was_forgotten_while_it_ran_is_not_kept(windowed: Scheduler) -> None:
    request = windowed.begin("a", text(1, 150), "mine")
    windowed.step(150, new={"a": (tables(1, 150), 0)})
    windowed.begin("command", [1], "mine", forget="everything")
    assert not windowed.step(1, running={"a": (None, 150)}).keeps
    windowed.end(request)
    assert not windowed.step().keeps
    windowed.connector.shutdown()


# Models with states.


@pytest.fixture
def stateful(connector: Any) -> Scheduler:
    return Scheduler(connector, has_states=True, chunk_size=64)


def states_at(*rows: int) -> tuple[int, ...]:
    """Pages with states that end at these rows, and none between."""
    table = [0] * (max(rows) // PAGE)
    for row in rows:
        table[row // PAGE - 1] = 2000 + row
    return tuple(table)


def test_rows_are_kept_with_the_states_after_them(stateful: Scheduler) -> None:
    ids = text(1, 200)
    request = stateful.begin("a", ids)
    pages = list(range(1, 14))
    (keep,) = stateful.step(112, new={"a": ((pages[:7], [*states_at(112)]), 0)}).keeps
    assert keep.infos[-1].has_state and keep.tables == (tuple(pages[:7]), states_at(112))
    assert [(info.base_position, info.end) for info in keep.infos] == [(0, 64), (64, 112)]
    more = pages[7:12], [*states_at(192)][7:]
    (keep,) = stateful.step(80, running={"a": (more, 112)}).keeps
    assert keep.infos[-1].end == 192 and keep.infos[0].base_position == 112
    assert not stateful.step(8, running={"a": ((pages[12:], [3000]), 192)}).keeps
    stateful.end(request)
    assert not stateful.step().keeps  # no page ends there
    matched = stateful.connector.get_num_new_matched_tokens
    assert matched(stateful.begin("b", ids[:190]), 0) == (None, False)  # its chunks are fetched
    (load,) = stateful.step().fetches
    assert load.end == 112 and load.infos[-1].has_state


def test_requests_wait_while_the_states_of_others_are_held(
    stateful: Scheduler, connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connector, "HELD_ROWS", 1200)
    stateful.connector.planner.open([Hello("weights", "a model", 64, state_rows=1000)])
    ids = text(1, 200)
    stateful.begin("a", ids)
    stateful.step(192, new={"a": ((list(range(1, 13)), [*states_at(192)]), 0)})
    waiting = [stateful.begin(name, ids + text(2)) for name in "bcd"]
    assert [stateful.known(request) for request in waiting] == [0, 0, 0]
    assert [load.request_id for load in stateful.step().fetches] == ["b", "c"]
    for request in waiting:
        stateful.end(request)
    assert stateful.connector.held_rows == 0


def test_states_are_not_kept_of_what_is_forgotten(stateful: Scheduler) -> None:
    ids = text(1, 200)
    stateful.begin("a", ids, "mine")
    stateful.begin("command", [1], "mine", forget="everything")
    assert not stateful.step(112, new={"a": ((list(range(7)), [*states_at(112)]), 0)}).keeps
    stateful.connector.shutdown()
