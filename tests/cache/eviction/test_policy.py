from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.eviction.policy import Entry, EvictionPolicy, recompute_cost
from kvboost.tokens.hashing import ChunkKey
from support.lru import LRU

POLICIES = (LRU, LearnedPolicy)
every_policy = pytest.mark.parametrize("make", POLICIES, ids=lambda make: make.__name__)


def key(name: object) -> ChunkKey:
    return ChunkKey(str(name))


def chain(*names: object, parent: str = "root", nbytes: int = 1, cost: float = 1.0) -> list[Entry]:
    parents = [parent, *names[:-1]]
    return [
        Entry(key(name), key(before), nbytes, cost)
        for before, name in zip(parents, names, strict=True)
    ]


def filled(make: type, *paths: str) -> EvictionPolicy:
    """Each letter is a chunk, each path a request of its own, all new."""
    policy: EvictionPolicy = make()
    for path in paths:
        policy.add(chain(*path))
    return policy


class Cache:
    """Holds ``size`` chunks and evicts as the store does."""

    def __init__(self, policy: EvictionPolicy, size: int) -> None:
        self.policy, self.size = policy, size

    def request(self, *names: object) -> int:
        keys = [key(name) for name in names]
        hits = next((at for at, one in enumerate(keys) if one not in self.policy), len(keys))
        self.policy.touch(keys[:hits])
        while len(self.policy) + len(keys) - hits > self.size:
            self.policy.remove(next(one for one in self.policy if one not in keys[:hits]))
        self.policy.add(chain("root", *names)[1:][hits:])
        return hits


def test_lru_evicts_the_least_recently_used_first() -> None:
    policy = filled(LRU, "ab", "cd", "e")
    policy.touch([key("a"), key("b")])
    assert list(policy) == list("dceba")


@every_policy
def test_a_parent_is_evicted_after_its_last_child(make: type) -> None:
    policy = filled(make, "ab")
    policy.add(chain("c", parent="a"))
    assert sorted(list(policy)[:2]) == ["b", "c"] and list(policy)[2:] == ["a"]
    policy.remove(key("b"))
    assert list(policy) == ["c", "a"]


@every_policy
def test_unknown_keys_are_ignored_and_removed_keys_are_gone(make: type) -> None:
    policy = filled(make, "ab")
    policy.touch([key("a"), key("gone")])
    policy.touch([key("gone")])
    policy.touch([])
    policy.remove(key("b"))
    assert key("a") in policy and key("b") not in policy and len(policy) == 1
    with pytest.raises(KeyError):
        policy.remove(key("b"))


@every_policy
def test_a_parent_that_was_removed_before_its_child_can_be_added_again(make: type) -> None:
    policy = filled(make, "abc")
    policy.remove(key("a"))  # forgotten, with others below it still there
    assert list(policy) == ["c", "b"]
    policy.add(chain("a"))
    assert list(policy) == ["c", "b", "a"]
    for name in "bca":
        policy.remove(key(name))
    assert list(policy) == [] and len(policy) == 0


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.integers(0, 4)), max_size=40
)


@every_policy
@given(requests=requests)
@settings(max_examples=15, deadline=None)
def test_every_chunk_is_listed_once_and_no_parent_before_its_child(
    make: type, requests: list[tuple[list[int], int]]
) -> None:
    policy = make()
    parents: dict[ChunkKey, ChunkKey] = {}
    for blocks, num_evicted in requests:
        path = [key(f"/{blocks[: end + 1]}") for end in range(len(blocks))]
        hits = next((at for at, one in enumerate(path) if one not in parents), len(path))
        policy.touch(path[:hits])
        for _ in range(num_evicted):
            victim = next((one for one in policy if one not in path[:hits]), None)
            if victim is not None:
                assert victim not in parents.values()
                policy.remove(victim)
                del parents[victim]
        new = chain("root", *path)[1:][hits:]
        policy.add(new)
        parents.update((entry.key, entry.parent) for entry in new)
        order = list(policy)
        assert sorted(order) == sorted(parents) and len(policy) == len(parents)
        place = {one: at for at, one in enumerate(order)}
        assert all(place[one] < place[up] for one, up in parents.items() if up in place)


def test_without_evidence_the_learned_order_is_that_of_lru() -> None:
    ours, lru = LearnedPolicy(), LRU()
    for policy in (ours, lru):
        cache = Cache(policy, 60)
        rng = random.Random(1)
        for _ in range(400):
            number = rng.randrange(40)
            cache.request("system", *(f"{number}.{block}" for block in range(rng.randrange(1, 5))))
    assert not ours.is_trusted
    assert list(ours) == list(lru)


def test_expensive_or_small_chunks_stay_longer() -> None:
    policy = LearnedPolicy()
    large = [f"large {number}" for number in range(40)]
    for name in large[:20]:
        policy.add(chain(name, nbytes=4, cost=2.0))
    policy.add(chain("dear", cost=3.0))
    policy.add(chain("small", cost=2.0))
    for name in large[20:]:
        policy.add(chain(name, nbytes=4, cost=2.0))
    assert list(policy) == [*large, "small", "dear"]


def ask(cache: Cache, document: int, *question: str) -> int:
    return cache.request(*(f"document {document}.{block}" for block in range(4)), *question)


def serve(cache: Cache) -> None:
    """A few documents are asked about again and again, among texts that come by once."""
    rng = random.Random(2)
    for number in range(1_000):
        ask(cache, rng.randrange(12), f"question {number}")
        cache.request(*(f"once {number}.{block}" for block in range(6)))


def test_a_scan_evicts_little_else() -> None:
    kept = {}
    for make in (LRU, LearnedPolicy):
        cache = Cache(make(), 80)
        serve(cache)
        for number in range(60):
            cache.request(*(f"scan {number}.{block}" for block in range(6)))
        kept[make] = sum(ask(cache, document) for document in range(12))
    assert kept[LRU] == 0
    assert kept[LearnedPolicy] > 40  # of 48


def test_bytes_and_cost_matter_to_the_learned_order() -> None:
    policy = LearnedPolicy()
    serve(Cache(policy, 80))
    for name, nbytes, cost in (("large", 50, 1.0), ("plain", 1, 1.0), ("dear", 1, 50.0)):
        policy.add(chain(name, nbytes=nbytes, cost=cost))
    order = [name for name in policy if name in ("large", "plain", "dear")]
    assert policy.is_trusted and order == ["large", "plain", "dear"]


def test_new_chunks_continue_the_path_they_follow_whatever_else_the_request_used() -> None:
    policy = LearnedPolicy()
    for path in ("ab", "moved", "xy"):
        policy.add(chain(*path))
    policy.touch([key("a"), key("b")], [key("o"), key("v")], [key("x")])
    policy.add(chain("c", parent="b"))
    visits = {name: policy._memories[key(name)].visit for name in "abcovx"}
    assert visits["a"] is visits["b"] is visits["c"] and visits["c"].length == 3
    assert visits["o"] is visits["v"] and visits["v"] is not visits["x"]


def test_what_is_learned_aside_is_as_good_as_what_is_learned_on_the_way() -> None:
    aside, alone = LearnedPolicy(), LearnedPolicy()
    for policy in (aside, alone):
        cache = Cache(policy, 80)
        rng = random.Random(2)
        for number in range(600):
            ask(cache, rng.randrange(12), f"question {number}")
            cache.request(*(f"once {number}.{block}" for block in range(6)))
            if policy is aside and (study := policy.study()) is not None:
                study()()
    assert aside.is_trusted and alone.is_trusted
    assert aside._model.fits > alone._model.fits > 0


def test_the_history_of_evicted_chunks_is_bounded() -> None:
    policy = LearnedPolicy()
    cache = Cache(policy, 20)
    for number in range(600):
        cache.request(*(f"{number}.{block}" for block in range(5)))
    bound = policy.HISTORY * 20 + policy.MIN_HISTORY
    assert len(policy._left) <= bound
    assert len(policy._memories) <= bound + 20
    assert len(policy._heap) <= 2 * 20 + 64


def test_late_tokens_cost_more_to_compute_again() -> None:
    assert recompute_cost(0, 1, 0.5) == 1.0
    assert recompute_cost(10, 4, 0.0) == 4.0
    assert recompute_cost(10, 4, 0.01) == pytest.approx(4 * (1 + 0.01 * 11.5))
    assert sum(recompute_cost(at, 1, 0.1) for at in range(8)) == pytest.approx(
        recompute_cost(0, 8, 0.1)
    )
