from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.eviction.policy import Entry, EvictionPolicy
from kvboost.cache.tiers import ordered
from kvboost.cache.tiers.ordered import READ_AHEAD, Aside, OrderedTier
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.hashing import ChunkKey
from support.chunks import make_chunk
from support.lru import LRU

SECONDS = 30.0
"""More than anything here takes."""


class Recording(LRU):
    """Remembers what was added together."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[list[str]] = []

    def add(self, entries: Sequence[Entry]) -> None:
        self.added.append([entry.key for entry in entries])
        super().add(entries)


def entry(name: str, parent: str = "root") -> Entry:
    return Entry(ChunkKey(name), ChunkKey(parent), nbytes=1, cost=1.0)


def test_chunks_of_a_request_are_ordered_together_although_others_leave_meanwhile() -> None:
    policy = Recording()
    tier = OrderedTier(RamTier(1000), policy)
    tier.add(entry("old"))
    tier.order_new()
    tier.add(entry("a"))
    tier.remove(ChunkKey("old"))
    tier.add(entry("b", parent="a"))
    tier.order_new()
    tier.settle()
    assert policy.added == [["old"], ["a", "b"]]
    assert list(policy) == ["b", "a"]


def test_a_new_chunk_can_be_removed_before_it_is_ordered() -> None:
    policy = Recording()
    tier = OrderedTier(RamTier(1000), policy)
    tier.add(entry("a"))
    tier.remove(ChunkKey("a"))
    tier.order_new()
    tier.settle()
    assert len(tier) == 0 and list(policy) == []


def test_chunks_that_are_not_ordered_yet_go_last_but_they_go() -> None:
    tier = OrderedTier(RamTier(1000), Recording())
    tier.add(entry("old"))
    tier.order_new()
    tier.add(entry("a"))
    gone = []
    while (key := tier.next_to_go(lambda _: False)) is not None:
        tier.remove(key)
        gone.append(key)
    assert gone == ["old", "a"]


def test_the_share_of_its_budget_that_is_taken() -> None:
    chunk = make_chunk([1, 2, 3])
    tier = OrderedTier(RamTier(4 * chunk.nbytes), LRU())
    assert tier.used_share == 0
    assert tier.tier.put(chunk)
    assert tier.used_share == 0.25
    assert OrderedTier(RamTier(0), LRU()).used_share == 0


def never(_: ChunkKey) -> bool:
    return False


def filled(num_chunks: int, policy: EvictionPolicy | None = None) -> OrderedTier:
    """Chunks "0", "1" and so on, each a request of its own."""
    tier = OrderedTier(RamTier(1000), LRU() if policy is None else policy)
    for number in range(num_chunks):
        tier.add(entry(str(number)))
        tier.order_new()
    return tier


def next_gone(tier: OrderedTier) -> str | None:
    key = tier.next_to_go(never)
    if key is not None:
        tier.remove(key)
    return key


steps = st.lists(
    st.tuples(st.sampled_from(["touch", "add", "go", "settle"]), st.integers(0, 9)), max_size=60
)


@pytest.mark.parametrize("make", [LRU, LearnedPolicy], ids=lambda make: make.__name__)
@given(steps=steps)
@settings(max_examples=60, deadline=None)
def test_chunks_leave_a_small_tier_as_if_its_policy_heard_of_everything_at_once(
    make: Callable[[], EvictionPolicy], steps: list[tuple[str, int]]
) -> None:
    tier, eager = OrderedTier(RamTier(1000), make()), make()
    parents = {ChunkKey("root"): ChunkKey("")}
    for number, (what, which) in enumerate(steps):
        path = [list(parents)[which % len(parents)]]
        while parents[path[0]]:
            path.insert(0, parents[path[0]])
        if what == "touch":
            tier.touch(path[1:])
            eager.touch(path[1:])
        elif what == "add" and len(parents) < READ_AHEAD:
            new = entry(str(number), path[-1])
            tier.add(new)
            tier.order_new()
            eager.add([new])
            parents[new.key] = new.parent
        elif what == "go":
            key = next(iter(eager), None)
            assert next_gone(tier) == key
            if key is not None:
                eager.remove(key)
                del parents[key]
        else:
            tier.settle()


def test_a_large_tier_chooses_some_chunks_at_a_time_and_spares_those_used_since() -> None:
    tier = filled(4 * READ_AHEAD)  # five at a time
    assert next_gone(tier) == "0"
    tier.touch([ChunkKey("1")], [ChunkKey("3")])
    tier.remove(ChunkKey("2"))
    assert [next_gone(tier) for _ in range(3)] == ["4", "5", "6"]


def test_a_chunk_that_came_back_is_not_taken_for_the_one_that_was_chosen() -> None:
    tier = filled(4 * READ_AHEAD)
    assert next_gone(tier) == "0"
    tier.remove(ChunkKey("1"))
    tier.add(entry("1"))
    tier.order_new()
    assert next_gone(tier) == "2"


def test_a_held_chunk_is_passed_over_and_leaves_when_it_is_free() -> None:
    tier = filled(3 * READ_AHEAD)
    held = {str(number) for number in range(2 * READ_AHEAD)}  # more than are chosen at a time
    assert tier.next_to_go(held.__contains__) == str(2 * READ_AHEAD)
    assert tier.next_to_go(lambda _: True) is None
    assert tier.next_to_go(never) == "0"


class Student(LRU):
    """Has something to learn, which takes until it is told that it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.may_end, self.learned = (threading.Event() for _ in range(3))

    def study(self) -> Callable[[], Callable[[], None]]:
        def learn() -> Callable[[], None]:
            self.began.set()
            assert self.may_end.wait(SECONDS)
            return self.learned.set

        return learn


def test_nobody_waits_while_a_policy_learns() -> None:
    policy = Student()
    tier = filled(4, policy)
    aside = Aside(tier.settle, "order")
    aside.ask()
    assert policy.began.wait(SECONDS)
    tier.touch([ChunkKey("0")])
    assert next_gone(tier) == "1" and not policy.learned.is_set()
    policy.may_end.set()
    assert policy.learned.wait(SECONDS)


def test_work_aside_is_done_again_if_it_is_asked_for_meanwhile() -> None:
    begun, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def work() -> None:
        assert threading.current_thread() is not threading.main_thread()
        begun.release()
        assert go_on.acquire(timeout=SECONDS)

    aside = Aside(work, "order")
    aside.ask()
    assert begun.acquire(timeout=SECONDS)
    aside.ask()
    go_on.release(2)
    assert begun.acquire(timeout=SECONDS)


def test_the_thread_ends_without_work_and_comes_back_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ordered, "IDLE_SECONDS", 0.01)
    done = threading.Semaphore(0)
    aside = Aside(lambda: done.release() and None, "order")
    for _ in range(2):
        aside.ask()
        assert done.acquire(timeout=SECONDS)
        assert aside._thread is not None
        aside._thread.join(SECONDS)
        assert not aside._thread.is_alive()
