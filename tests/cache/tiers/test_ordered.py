from __future__ import annotations

from collections.abc import Sequence

from kvboost.cache.eviction.policy import LRU, Entry
from kvboost.cache.tiers.ordered import OrderedTier
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.hashing import ChunkKey


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
    assert policy.added == [["old"], ["a", "b"]]
    assert list(policy) == ["b", "a"]


def test_a_new_chunk_can_be_removed_before_it_is_ordered() -> None:
    policy = Recording()
    tier = OrderedTier(RamTier(1000), policy)
    tier.add(entry("a"))
    tier.remove(ChunkKey("a"))
    tier.order_new()
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


def test_a_budget_is_of_bytes_or_of_chunks(monkeypatch) -> None:
    tier = OrderedTier(RamTier(1000), LRU(), max_chunks=4)
    assert tier.used_share == 0
    tier.add(entry("a"))
    assert tier.used_share == 0.25
    monkeypatch.setattr(tier.tier, "_nbytes", 700)
    assert tier.used_share == 0.7
    assert OrderedTier(RamTier(0), LRU()).used_share == 0
