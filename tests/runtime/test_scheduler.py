from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import QueueFullError
from kvboost.results import ReuseReport, Span, SpanKind
from kvboost.runtime.request import RequestState
from kvboost.runtime.scheduler import PATIENCE_SECONDS, Job, Scheduler, num_shared
from kvboost.tokens.hashing import ChunkKey, root_key
from support.requests import NoListener, request_of

ROOT, OTHER = root_key("model", ""), root_key("model", "salt")
TEXT = np.random.default_rng(0).integers(0, 1000, 4000)
CHUNK_REUSE = GenerationMode.CHUNK_KV_REUSE


def job(
    tokens: object = (1, 2, 3),
    root: str = ROOT,
    *,
    mode: GenerationMode = CHUNK_REUSE,
    tenant: str = "",
    deadline: float | None = None,
) -> Job:
    state = RequestState(request_of(tokens, mode, tenant=tenant))
    return Job(state, ChunkKey(root), NoListener(), deadline=deadline)


def scheduler(**config: object) -> Scheduler:
    return Scheduler(EngineConfig(**config), step_rows=100)  # type: ignore[arg-type]


def fits(_: Job) -> bool:
    return True


def plan(planned: Job, computed: range | None = None) -> None:
    """Plans a job: the rows of ``computed`` must be computed (by default all), the others hit."""
    total = len(planned.token_ids)
    rows = computed or range(total)
    ends = (
        (0, rows.start, "exact"),
        (rows.start, rows.stop, "compute"),
        (rows.stop, total, "exact"),
    )
    spans = (Span(SpanKind(kind), start, end) for start, end, kind in ends if start < end)
    planned.state.reuse = ReuseReport(tuple(spans))


def answer(answering: Job) -> None:
    """Gives a job the first token of its answer."""
    answering.state.token_ids.append(1)


def reading(scheduled: Scheduler, tokens: object, **rest: object) -> Job:
    """A job that has started and has its whole prompt to read."""
    started = job(tokens, **rest)  # type: ignore[arg-type]
    scheduled.add(started)
    assert scheduled.start(0.0, fits) is started
    plan(started)
    return started


def test_a_full_queue_says_when_to_retry() -> None:
    full = scheduler(max_waiting=2, max_running=1)
    reading(full, TEXT[:5])
    full.add(job())
    full.add(job())
    with pytest.raises(QueueFullError, match="2 requests are waiting") as error:
        full.add(job())
    assert error.value.waiting == 2 and 1 <= error.value.retry_after <= 60
    full.add(job(), bounded=False)
    assert len(full.waiting) == 3


def test_retry_takes_longer_if_requests_finish_slowly() -> None:
    slow = scheduler(max_waiting=1000)
    for second in range(0, 100, 5):
        reading(slow, TEXT[:8])
        slow.remove(slow.running[0], float(second))
    for _ in range(20):
        slow.add(job())
    assert 20 < slow.retry_after() <= 60


def test_requests_start_in_order_of_arrival_up_to_max_running() -> None:
    scheduled = scheduler(max_running=2)
    jobs = [job() for _ in range(3)]
    for one in jobs:
        scheduled.add(one)
    started = [scheduled.start(0.0, fits) for _ in range(3)]
    assert started == [jobs[0], jobs[1], None]
    scheduled.remove(jobs[0], 1.0)
    assert scheduled.start(1.0, fits) is jobs[2]


def test_the_tenant_with_the_fewest_running_requests_goes_first() -> None:
    scheduled = scheduler()
    flood = [job(tenant="alice") for _ in range(5)]
    late = job(tenant="bob")
    for one in (*flood, late):
        scheduled.add(one)
    assert scheduled.start(0.0, fits) is flood[0]
    assert scheduled.start(0.0, fits) is late
    assert scheduled.start(0.0, fits) is flood[1]


def test_a_fresh_cache_salt_per_request_gains_a_tenant_nothing() -> None:
    scheduled = scheduler(max_running=2)
    for number in range(50):
        scheduled.add(job(root=root_key("model", str(number)), tenant="alice"))
    late = job(tenant="bob")
    scheduled.add(late)
    first, second = scheduled.start(0.0, fits), scheduled.start(0.0, fits)
    assert (first in scheduled.running, second) == (True, late)


def test_no_tenant_can_fill_the_queue() -> None:
    scheduled = scheduler(max_running=1, max_waiting=8)
    reading(scheduled, TEXT[:5], tenant="alice")
    with pytest.raises(QueueFullError, match=r"4 requests of tenant 'alice'.*other tenants"):
        for _ in range(20):
            scheduled.add(job(tenant="alice"))
    with pytest.raises(QueueFullError, match="2 requests of tenant 'bob'"):
        for _ in range(20):
            scheduled.add(job(tenant="bob"))
    scheduled.add(job(tenant="carol"))
    assert len(scheduled.waiting) == 7


def test_a_tenant_that_runs_leaves_the_last_place_to_others() -> None:
    scheduled = scheduler(max_running=1, max_waiting=1)
    running = reading(scheduled, TEXT[:5], tenant="alice")
    for turn, (busy, other) in enumerate([("alice", "bob"), ("bob", "alice")] * 2):
        with pytest.raises(QueueFullError, match=f"0 requests of tenant '{busy}'.*other tenants"):
            scheduled.add(job(tenant=busy))
        scheduled.add(job(tenant=other))
        scheduled.remove(running, float(turn))
        started = scheduled.start(float(turn), fits)
        assert started is not None and started.tenant == other
        running = started


@pytest.mark.parametrize(("max_waiting", "most"), [(0, 1), (1, 1), (2, 2), (3, 3), (8, 5)])
def test_a_tenant_may_queue_its_share_however_soon_its_first_job_starts(max_waiting, most) -> None:
    for starts_at in (1, most):
        scheduled = scheduler(max_running=1, max_waiting=max_waiting)
        for number in range(most):
            scheduled.add(job(tenant="alice"))
            if number + 1 == starts_at:
                assert scheduled.start(0.0, fits) is not None
        with pytest.raises(QueueFullError):
            scheduled.add(job(tenant="alice"))


def test_requests_that_can_start_at_once_do_not_count_against_a_tenant() -> None:
    scheduled = scheduler(max_running=16, max_waiting=1)
    for _ in range(17):
        scheduled.add(job(tenant="alice"))
    with pytest.raises(QueueFullError):
        scheduled.add(job(tenant="alice"))


def test_a_request_that_does_not_fit_is_not_overtaken() -> None:
    scheduled = scheduler()
    large, small = job(TEXT[:100]), job(TEXT[100:110])
    scheduled.add(large)
    scheduled.add(small)
    assert scheduled.start(0.0, lambda one: len(one.token_ids) < 50) is None
    assert scheduled.waiting == [large, small]


def test_a_prompt_waits_for_the_request_that_reads_its_prefix() -> None:
    scheduled = scheduler()
    first = reading(scheduled, TEXT[:1000])
    second, unrelated = job(np.r_[TEXT[:800], 1, 2, 3]), job(TEXT[2000:2600])
    scheduled.add(second)
    scheduled.add(unrelated)
    assert scheduled.start(0.0, fits) is unrelated  # it overtakes the second
    assert scheduled.start(0.0, fits) is None
    first.state.rows = 500
    assert scheduled.start(1.0, fits) is None
    first.state.rows = 800  # what they share is in place
    assert scheduled.start(1.0, fits) is second


def test_a_prompt_waits_for_the_request_that_reads_its_document() -> None:
    scheduled = scheduler()
    first = reading(scheduled, TEXT[:1000])
    moved = np.r_[TEXT[3000:3100], TEXT[200:900]]
    exact_only = job(moved, mode=GenerationMode.PREFIX_CACHE)
    without = job(moved, mode=GenerationMode.BASELINE)
    with_moved = job(moved)
    for one in (with_moved, exact_only, without):
        scheduled.add(one)
    assert scheduled.start(0.0, fits) is exact_only
    assert scheduled.start(0.0, fits) is without
    assert scheduled.start(0.0, fits) is None
    answer(first)
    assert scheduled.start(0.0, fits) is None, "another has begun to read it"
    answer(exact_only)
    assert scheduled.start(0.0, fits) is with_moved


def test_a_request_waits_only_so_long_for_shared_text() -> None:
    scheduled = scheduler()
    reading(scheduled, TEXT[:1000])
    held = job(TEXT[:900])
    scheduled.add(held)
    assert scheduled.start(5.0, fits) is None
    assert scheduled.start(6.9, fits) is None
    assert scheduled.start(7.0, fits) is held


@pytest.mark.parametrize(
    "why", ["another root", "known already", "too little", "not reading", "baseline"]
)
def test_a_request_does_not_wait_if_that_saves_nothing(why: str) -> None:
    scheduled = scheduler()
    mode = GenerationMode.BASELINE if why == "baseline" else GenerationMode.CHUNK_KV_REUSE
    first = reading(scheduled, TEXT[:1000], mode=mode)
    if why == "known already":
        plan(first, range(950, 1000))
    if why == "not reading":
        answer(first)
    root = OTHER if why == "another root" else ROOT
    tokens = np.r_[TEXT[:60], TEXT[3000:3500]] if why == "too little" else TEXT[:900]
    second = job(tokens, root)
    scheduled.add(second)
    assert scheduled.start(0.0, fits) is second


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 600), st.lists(st.integers(0, 999)))
def test_the_estimate_of_shared_tokens_is_about_right(
    start: int, length: int, done: int, header: list[int]
) -> None:
    other = job(TEXT[:1000])
    other.state.rows = done
    piece = TEXT[start : start + length]
    counted = num_shared(job(np.r_[header, piece].astype(int)), other, other.left_to_read)
    left = max(0, start + length - max(start, done))
    assert counted <= left + 150 and (left < 400 or counted >= left // 3)


def test_a_step_takes_all_answering_requests_and_the_shortest_prompts() -> None:
    scheduled = scheduler()
    answering = [reading(scheduled, TEXT[i * 300 : i * 300 + 200]) for i in range(2)]
    for one in answering:
        answer(one)
    long, short, middle = (
        reading(scheduled, TEXT[start:stop])
        for start, stop in ((700, 1500), (1500, 1530), (1600, 1660))
    )
    rows = {answering[0]: 1, answering[1]: 1, long: 100, short: 30, middle: 60}
    assert scheduled.pick(rows, 0.0) == [*answering, short, middle]
    assert scheduled.pick({**rows, short: 400}, 0.0) == [*answering, short], "at least one goes"
    assert scheduled.pick({long: 100}, 0.0) == [long]
    assert scheduled.pick(rows, 0.0, taken=40) == [*answering, short], "after others of this step"
    assert scheduled.pick({long: 100}, 0.0, taken=40) == [], "it waits for the next step"
    assert scheduled.slice_rows(False) > scheduled.slice_rows(True)
    rows[middle] = 80
    late = PATIENCE_SECONDS + 1
    for one in (short, middle):
        one.started = late
    assert scheduled.pick(rows, late) == [*answering, long], "it has been patient"


def test_requests_expire_at_their_deadline() -> None:
    scheduled = scheduler(max_running=1)
    running = reading(scheduled, TEXT[:10], deadline=5.0)
    waiting, patient = job(deadline=3.0), job()
    scheduled.add(waiting)
    scheduled.add(patient)
    assert scheduled.expired(2.9) == []
    assert scheduled.expired(3.0) == [waiting]
    assert scheduled.expired(9.0) == [waiting, running]


@given(st.integers(0, 10**6))
def test_every_request_is_served_in_any_traffic(seed: int) -> None:
    rng = random.Random(seed)
    scheduled = scheduler(max_running=3)
    coming = [
        job(
            TEXT[(a := rng.randrange(3000)) : a + rng.randrange(1, 900)],
            rng.choice([ROOT, OTHER]),
            tenant=rng.choice(["", "alice"]),
        )
        for _ in range(rng.randrange(1, 15))
    ]
    done: list[Job] = []
    for now in range(10_000):
        if coming and rng.random() < 0.5:
            scheduled.add(coming.pop())
        while (one := scheduled.start(float(now), lambda job: rng.random() < 0.9)) is not None:
            plan(one, range(rng.randrange(len(one.token_ids)), len(one.token_ids)))
        assert len(scheduled.running) <= 3
        needs = {one: min(one.rows_left, 100) if one.is_reading else 1 for one in scheduled.running}
        picked = scheduled.pick(needs, float(now))
        assert bool(picked) == bool(needs) and len(set(picked)) == len(picked)
        for one in picked:
            if not one.is_reading and rng.random() < 0.3:
                scheduled.remove(one, float(now))
                done.append(one)
            one.state.rows = len(one.token_ids) - max(0, one.rows_left - 100)
            if one.rows_left == 0:
                answer(one)
        if not (coming or scheduled.waiting or scheduled.running):
            break
    assert not (coming or scheduled.waiting or scheduled.running)
    assert len(set(done)) == len(done)


def test_no_request_starts_while_others_fill_the_next_step() -> None:
    scheduled = scheduler()
    first = reading(scheduled, TEXT[:600])
    longer, shorter = job(TEXT[1000:1700]), job(TEXT[2000:2050])
    scheduled.add(longer)
    assert scheduled.start(1.0, fits, {}) is None, "the first is still being assembled"
    assert scheduled.start(1.0, fits, {first: 400}) is None
    scheduled.add(shorter)
    assert scheduled.start(1.0, fits, {first: 400}) is shorter, "it has less to read"
    plan(shorter)
    assert scheduled.start(1.0, fits, {first: 390, shorter: 50}) is None
    assert scheduled.start(1.0, fits, {first: 10, shorter: 50}) is longer, "there is room"


def test_a_request_that_waits_for_a_device_holds_no_other_back() -> None:
    scheduled = scheduler()
    reading(scheduled, TEXT[:600]).state.awaits = lambda: False
    late = job(TEXT[1000:1700])
    scheduled.add(late)
    assert scheduled.start(1.0, fits, {}) is late


def test_a_full_step_delays_a_start_only_briefly() -> None:
    scheduled = scheduler()
    first, late = reading(scheduled, TEXT[:100]), job(TEXT[1000:1700])
    scheduled.add(late)
    assert scheduled.start(PATIENCE_SECONDS, fits, {first: 400}) is None
    assert scheduled.start(PATIENCE_SECONDS + 0.1, fits, {first: 400}) is late
