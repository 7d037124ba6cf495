from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import QueueFullError
from kvboost.runtime.scheduler import PATIENCE_SECONDS, Job, Scheduler, num_shared
from kvboost.tokens.hashing import as_token_ids, root_key

ROOT, OTHER = root_key("model", ""), root_key("model", "tenant")
TEXT = np.random.default_rng(0).integers(0, 1000, 4000)


def job(tokens: object = (1, 2, 3), root: str = ROOT, **rest: object) -> Job:
    return Job(as_token_ids(tokens), root, **rest)  # type: ignore[arg-type]


def scheduler(**config: object) -> Scheduler[Job]:
    return Scheduler(EngineConfig(**config), step_rows=100)  # type: ignore[arg-type]


def fits(_: Job) -> bool:
    return True


def reading(scheduled: Scheduler[Job], tokens: object, **rest: object) -> Job:
    """A job that has started and has all of its prompt to read."""
    one = job(tokens, **rest)
    scheduled.add(one)
    assert scheduled.start(0.0, fits) is one
    one.to_read = (range(len(one.token_ids)),)
    return one


def test_the_queue_is_bounded_and_says_when_to_come_again() -> None:
    full = scheduler(max_waiting=2, max_running=1)
    reading(full, TEXT[:5])
    full.add(job())
    full.add(job())
    with pytest.raises(QueueFullError, match="2 requests are waiting") as error:
        full.add(job())
    assert error.value.waiting == 2 and 1 <= error.value.retry_after <= 60
    full.add(job(), bounded=False)
    assert len(full.waiting) == 3


def test_it_takes_longer_where_requests_finish_slowly() -> None:
    slow = scheduler(max_waiting=1000)
    for second in range(0, 100, 5):
        reading(slow, TEXT[:8])
        slow.remove(slow.running[0], float(second))
    for _ in range(20):
        slow.add(job())
    assert 20 < slow.retry_after() <= 60


def test_they_start_in_order_of_arrival_up_to_a_number() -> None:
    scheduled = scheduler(max_running=2)
    jobs = [job() for _ in range(3)]
    for one in jobs:
        scheduled.add(one)
    started = [scheduled.start(0.0, fits) for _ in range(3)]
    assert started == [jobs[0], jobs[1], None]
    scheduled.remove(jobs[0], 1.0)
    assert scheduled.start(1.0, fits) is jobs[2]


def test_whoever_has_least_running_goes_first() -> None:
    scheduled = scheduler()
    flood = [job() for _ in range(5)]
    late = job(root=OTHER)
    for one in (*flood, late):
        scheduled.add(one)
    assert scheduled.start(0.0, fits) is flood[0]
    assert scheduled.start(0.0, fits) is late
    assert scheduled.start(0.0, fits) is flood[1]


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    scheduled = scheduler()
    large, small = job(TEXT[:100]), job(TEXT[100:110])
    scheduled.add(large)
    scheduled.add(small)
    assert scheduled.start(0.0, lambda one: len(one.token_ids) < 50) is None
    assert scheduled.waiting == [large, small]


def test_a_prompt_waits_for_the_one_that_reads_its_beginning() -> None:
    scheduled = scheduler(sharing_wait=3.0)
    first = reading(scheduled, TEXT[:1000])
    second, unrelated = job(np.r_[TEXT[:800], 1, 2, 3]), job(TEXT[2000:2600])
    scheduled.add(second)
    scheduled.add(unrelated)
    assert scheduled.start(0.0, fits) is unrelated  # it goes past
    assert scheduled.start(0.0, fits) is None
    first.rows_done = 500
    assert scheduled.start(1.0, fits) is None
    first.rows_done = 800  # what they share is in place
    assert scheduled.start(1.0, fits) is second


def test_a_prompt_waits_for_the_one_that_reads_its_document() -> None:
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
    first.is_reading = False
    assert scheduled.start(0.0, fits) is None, "another has begun to read it"
    exact_only.is_reading = False
    assert scheduled.start(0.0, fits) is with_moved


def test_nobody_waits_longer_than_told() -> None:
    scheduled = scheduler(sharing_wait=2.0)
    reading(scheduled, TEXT[:1000])
    held = job(TEXT[:900])
    scheduled.add(held)
    assert scheduled.start(5.0, fits) is None
    assert scheduled.start(6.9, fits) is None
    assert scheduled.start(7.0, fits) is held


@pytest.mark.parametrize(
    "why", ["never", "another root", "known already", "too little", "not reading", "baseline"]
)
def test_nobody_waits_for_nothing(why: str) -> None:
    scheduled = scheduler(sharing_wait=0.0 if why == "never" else 9.0)
    mode = GenerationMode.BASELINE if why == "baseline" else GenerationMode.CHUNK_KV_REUSE
    first = reading(scheduled, TEXT[:1000], mode=mode)
    if why == "known already":
        first.to_read = (range(950, 1000),)
    if why == "not reading":
        first.is_reading = False
    root = OTHER if why == "another root" else ROOT
    tokens = np.r_[TEXT[:60], TEXT[3000:3500]] if why == "too little" else TEXT[:900]
    second = job(tokens, root)
    scheduled.add(second)
    assert scheduled.start(0.0, fits) is second


@given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 600), st.lists(st.integers(0, 999)))
def test_what_two_share_is_about_right(
    start: int, length: int, done: int, header: list[int]
) -> None:
    other = job(TEXT[:1000], to_read=(range(1000),), rows_done=done)
    piece = TEXT[start : start + length]
    counted = num_shared(job(np.r_[header, piece].astype(int)), other)
    left = max(0, start + length - max(start, done))
    assert counted <= left + 150 and (left < 400 or counted >= left // 3)


def test_a_step_takes_everyone_who_answers_and_the_shortest_prompts() -> None:
    scheduled = scheduler()
    answering = [reading(scheduled, TEXT[i * 300 : i * 300 + 200]) for i in range(2)]
    for one in answering:
        one.is_reading = False
    long, short, middle = (
        reading(scheduled, TEXT[start:stop])
        for start, stop in ((700, 1500), (1500, 1530), (1600, 1660))
    )
    rows = {answering[0]: 1, answering[1]: 1, long: 100, short: 30, middle: 60}
    assert scheduled.pick(rows, 0.0) == [*answering, short, middle]
    assert scheduled.pick({**rows, short: 400}, 0.0) == [*answering, short], "at least one goes"
    assert scheduled.pick({long: 100}, 0.0) == [long]
    assert scheduled.slice_rows(False) > scheduled.slice_rows(True)
    rows[middle] = 80
    late = PATIENCE_SECONDS + 1
    for one in (short, middle):
        one.started = late
    assert scheduled.pick(rows, late) == [*answering, long], "it has been patient"


def test_deadlines() -> None:
    scheduled = scheduler(max_running=1)
    running = reading(scheduled, TEXT[:10], deadline=5.0)
    waiting, patient = job(deadline=3.0), job()
    scheduled.add(waiting)
    scheduled.add(patient)
    assert scheduled.expired(2.9) == []
    assert scheduled.expired(3.0) == [waiting]
    assert scheduled.expired(9.0) == [waiting, running]


@given(st.integers(0, 10**6))
def test_everyone_is_served_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    scheduled = scheduler(max_running=3, sharing_wait=rng.choice([0.0, 2.0]))
    coming = [
        job(TEXT[(a := rng.randrange(3000)) : a + rng.randrange(1, 900)], rng.choice([ROOT, OTHER]))
        for _ in range(rng.randrange(1, 15))
    ]
    done: list[Job] = []
    for now in range(10_000):
        if coming and rng.random() < 0.5:
            scheduled.add(coming.pop())
        while (one := scheduled.start(float(now), lambda job: rng.random() < 0.9)) is not None:
            one.to_read = (range(rng.randrange(len(one.token_ids)), len(one.token_ids)),)
        assert len(scheduled.running) <= 3
        needs = {one: min(one.rows_left, 100) if one.is_reading else 1 for one in scheduled.running}
        picked = scheduled.pick(needs, float(now))
        assert bool(picked) == bool(needs) and len(set(picked)) == len(picked)
        for one in picked:
            if not one.is_reading and rng.random() < 0.3:
                scheduled.remove(one, float(now))
                done.append(one)
            one.rows_done = len(one.token_ids) - max(0, one.rows_left - 100)
            one.is_reading = one.rows_left > 0
        if not (coming or scheduled.waiting or scheduled.running):
            break
    assert not (coming or scheduled.waiting or scheduled.running)
    assert len(set(done)) == len(done)


def test_nobody_is_put_in_place_while_others_fill_the_step() -> None:
    scheduled = scheduler(sharing_wait=0.0)
    first = reading(scheduled, TEXT[:600])
    longer, shorter = job(TEXT[1000:1700]), job(TEXT[2000:2050])
    scheduled.add(longer)
    assert scheduled.start(1.0, fits, {}) is None, "the first is still being put in place"
    assert scheduled.start(1.0, fits, {first: 400}) is None
    scheduled.add(shorter)
    assert scheduled.start(1.0, fits, {first: 400}) is shorter, "it has less to read"
    shorter.to_read = (range(50),)
    assert scheduled.start(1.0, fits, {first: 390, shorter: 50}) is None
    assert scheduled.start(1.0, fits, {first: 10, shorter: 50}) is longer, "there is room"


def test_nobody_is_kept_from_starting_for_long() -> None:
    scheduled = scheduler(sharing_wait=0.0)
    first, late = reading(scheduled, TEXT[:100]), job(TEXT[1000:1700])
    scheduled.add(late)
    assert scheduled.start(PATIENCE_SECONDS, fits, {first: 400}) is None
    assert scheduled.start(PATIENCE_SECONDS + 0.1, fits, {first: 400}) is late
