from __future__ import annotations

from kvboost.cache.eviction import LRU


def test_the_least_recently_used_goes_first_and_parents_outlive_children() -> None:
    policy = LRU()
    for key in "abcd":
        policy.add(key)
    policy.touch(["a", "b"])  # a is b's parent
    assert list(policy) == ["c", "d", "b", "a"]
    policy.remove("d")
    policy.touch(["gone", "c"])
    assert list(policy) == ["b", "a", "c"]
    assert len(policy) == 3
