from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest

from kvboost.cache.chunk import KVChunk
from kvboost.cache.tiers import writer as module
from kvboost.cache.tiers.writer import Writer
from support.chunks import make_chunk


class FakeTier:
    """Where chunks are written to; waits or refuses when told to."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.tried = 0
        self.refuses = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def write(self, chunk: KVChunk) -> bool:
        self.tried += 1
        self.may_go_on.wait()
        if not self.refuses:
            self.written.append(chunk.key)
        return not self.refuses


@pytest.fixture
def tier() -> FakeTier:
    return FakeTier()


@pytest.fixture
def make(tier: FakeTier) -> Callable[..., Writer]:
    made: list[Writer] = []

    def make(max_waiting: int = 10**6, max_pending: int = 10**6) -> Writer:
        made.append(
            Writer(tier.write, lambda key: None, max_waiting=max_waiting, max_pending=max_pending)
        )
        return made[-1]

    yield make
    tier.may_go_on.set()
    tier.refuses = False
    for one in made:
        one.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_chunk_is_written_when_it_is_cold_and_not_before(make, tier, monkeypatch) -> None:
    monkeypatch.setattr(module, "COLD_SECONDS", 0.2)
    writer = make()
    chunk = make_chunk([1])
    writer.enqueue(chunk)
    for _ in range(20):
        writer.touch([chunk.key])
        time.sleep(0.02)
    assert tier.written == [] and writer.get(chunk.key) is chunk
    until(lambda: tier.written == [chunk.key])
    until(lambda: not writer.is_pending(chunk.key))


def test_chunks_are_written_at_once_when_much_is_pending(make, tier) -> None:
    chunks = [make_chunk([number]) for number in range(4)]
    writer = make(max_pending=2 * chunks[0].nbytes)
    for chunk in chunks:
        writer.enqueue(chunk)
    until(lambda: tier.written == [chunk.key for chunk in chunks[:2]])
    assert writer.stats().pending == 2


def test_parents_are_written_first(make, tier) -> None:
    writer = make()
    parent = make_chunk([1])
    child = make_chunk([2], parent=parent.key, position=1)
    writer.enqueue(parent)
    writer.enqueue(child)
    writer.touch([parent.key])  # now the child is the colder one
    writer.flush()
    assert tier.written == [parent.key, child.key]


def test_evicted_chunks_are_held_until_written_within_a_limit(make, tier) -> None:
    first, second = make_chunk([1]), make_chunk([2])
    writer = make(max_waiting=first.nbytes)
    tier.may_go_on.clear()
    writer.enqueue(first)
    writer.enqueue(second)
    assert writer.evicted(first.key)
    assert writer.stats().waiting_bytes == first.nbytes
    assert not writer.evicted(second.key)  # too much
    assert not writer.is_pending(second.key) and not writer.evicted("unknown")
    writer.back_in_ram(first.key)
    assert writer.stats().waiting_bytes == 0
    assert writer.evicted(first.key)
    tier.may_go_on.set()
    until(lambda: tier.written == [first.key] and writer.stats().waiting_bytes == 0)


def test_a_failed_write_stays_pending_and_is_tried_again(make, tier, monkeypatch) -> None:
    writer = make()
    tier.refuses = True
    chunk = make_chunk([1])
    writer.enqueue(chunk)
    writer.flush()  # returns all the same
    assert writer.is_pending(chunk.key) and tier.tried >= 1
    tier.refuses = False
    writer.flush()
    assert tier.written == [chunk.key] and not writer.is_pending(chunk.key)


def test_a_chunk_that_cannot_be_written_does_not_block_the_others(make, tier) -> None:
    writer = make()
    chunks = [make_chunk([number]) for number in range(6)]
    write = tier.write
    tier.write = lambda chunk: chunk is not chunks[0] and write(chunk)
    writer.write = tier.write
    for chunk in chunks:
        writer.enqueue(chunk)
    writer.close()
    assert tier.written == [chunk.key for chunk in chunks[1:]]


def test_the_thread_survives_any_exception(make, tier) -> None:
    writer = make()

    def broken(chunk: KVChunk) -> bool:
        raise MemoryError

    writer.write = broken
    writer.enqueue(make_chunk([1]))
    writer.flush()
    writer.await_writing()
    writer.write = tier.write
    writer.flush()
    assert tier.written == [make_chunk([1]).key]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_does_not_wait_for_the_thread(make, tier) -> None:
    writer = make()
    tier.may_go_on.clear()
    writer.enqueue(make_chunk([1]))
    pid = os.fork()
    if not pid:
        writer.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_cancelled_chunks_are_not_written_and_current_writes_are_awaited(make, tier) -> None:
    writer = make()
    first, second = make_chunk([1]), make_chunk([2])
    tier.may_go_on.clear()
    writer.enqueue(first)
    assert writer.evicted(first.key)
    until(lambda: tier.tried == 1)
    writer.enqueue(second)
    writer.cancel(second.key)
    writer.cancel(first.key)
    waiting = threading.Thread(target=writer.await_writing)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    tier.may_go_on.set()
    waiting.join(120)
    assert not waiting.is_alive() and tier.written == [first.key]
    writer.await_writing()  # nothing is


def test_closing_writes_everything_and_accepts_nothing_more(make, tier) -> None:
    writer = make()
    chunks = [make_chunk([number]) for number in range(5)]
    for chunk in chunks:
        writer.enqueue(chunk)
    writer.close()
    assert tier.written == [chunk.key for chunk in chunks]
    writer.enqueue(make_chunk([9]))
    assert writer.stats().pending == 0
