from __future__ import annotations

import json
import random
from itertools import product

import pytest

from benchmarks import traffic
from kvboost.cache.eviction.policy import LRU
from kvboost.errors import ConfigError

OPTIMUM, OURS, POLICIES = traffic.OPTIMUM, traffic.OURS, traffic.POLICIES
Row, Trace = traffic.Row, traffic.Trace


def best_by_trying(trace: Trace, size: int) -> int:
    """Blocks served by the best of all caches: after each request any set may be kept of what was
    there and what was computed, as long as beginnings stay whole."""
    states = {frozenset[int](): 0}
    for path in trace.paths:
        after: dict[frozenset[int], int] = {}
        for here, hits in states.items():
            served = next((at for at, block in enumerate(path) if block not in here), len(path))
            known = sorted(here | set(path))
            for chosen in product((False, True), repeat=len(known)):
                kept = frozenset(block for block, keep in zip(known, chosen, strict=True) if keep)
                whole = all(
                    trace.parents[block] in kept or trace.parents[block] < 0 for block in kept
                )
                if whole and len(kept) <= size:
                    after[kept] = max(after.get(kept, 0), hits + served)
        states = after
    return max(states.values())


def random_trace(seed: int, requests: int, branches: int = 2) -> Trace:
    rng = random.Random(seed)
    prompts = [[rng.randrange(branches) for _ in range(rng.randint(1, 3))] for _ in range(requests)]
    return Trace.of("random", prompts, sizes=[3])


@pytest.mark.parametrize("seed", range(4))
def test_no_cache_serves_more_than_the_optimum(seed: int) -> None:
    trace = random_trace(seed, requests=7)
    assert traffic.optimum(trace, 3) == best_by_trying(trace, 3)
    trace = random_trace(seed, requests=60, branches=3)
    for size in (1, 4, 12):
        best = traffic.optimum(trace, size)
        assert all(traffic.replay(trace, make(), size) <= best for make in POLICIES.values())


def test_a_block_is_served_only_if_all_before_it_are() -> None:
    trace = Trace.of("two", [[1, 2, 3], [1, 2, 4], [5, 2, 3]])
    assert trace.parents == (-1, 0, 1, 1, -1, 4, 5)
    assert traffic.replay(trace, LRU(), 100) == traffic.optimum(trace, 100) == 2


def test_a_request_longer_than_the_cache_keeps_its_beginning() -> None:
    trace = Trace.of("long", [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]])
    for make in POLICIES.values():
        assert traffic.replay(trace, make(), 3) == 3


@pytest.mark.parametrize("trace", traffic.made_up(requests=500), ids=lambda trace: trace.name)
def test_ours_serves_what_lru_does_or_more_on_each_traffic(trace: Trace) -> None:
    rows = traffic.run([trace], trace.sizes[1:3])
    for row in rows:
        assert row.hit_rates[OURS] <= row.hit_rates[OPTIMUM]
        assert row.hit_rates[OURS] > row.hit_rates["LRU"] - 0.002, row  # chance
    assert traffic.mean_gap_closed(rows)[trace.name] > (0.2 if trace.name == "zipf" else 0.0)


def row(name: str, size: int, lru: float, ours: float, optimum: float) -> Row:
    return Row(name, size, {"FIFO": 0.1, "LFU": 0.1, "LRU": lru, OURS: ours, OPTIMUM: optimum})


ROWS = [row("a", 10, 0.2, 0.3, 0.6), row("a", 100, 0.4, 0.5, 0.6), row("b", 10, 0.5, 0.5, 0.5)]


def test_the_share_of_the_gap_is_told_where_there_is_one() -> None:
    assert [one.gap_closed for one in ROWS] == [pytest.approx(0.25), pytest.approx(0.5), None]
    assert traffic.mean_gap_closed(ROWS) == {"a": pytest.approx(0.375)}
    assert json.loads(json.dumps(ROWS[2].as_json()))["gap_closed"] is None


def test_a_trace_file_is_read(tmp_path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": [0, 1]}\n\n{"hash_ids": [0, 2]}\n')
    trace = traffic.read_trace(path)
    assert trace.name == "chat" and trace.paths == ((0, 1), (0, 2))
    assert max(trace.sizes) <= 3  # the usual sizes would hold all of it
    assert traffic.read_trace(path, [7]).sizes == (7,)


@pytest.mark.parametrize("line", ['{"ids": [1]}', "[1, 2]", "{", '{"hash_ids": ["a"]}', "3"])
def test_a_bad_line_is_named(tmp_path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"hash_ids": [0]}\n' + line)
    with pytest.raises(ConfigError, match=r"bad\.jsonl, line 2: .*each line must be such as"):
        traffic.read_trace(path)


def test_a_file_without_requests_or_none_at_all_is_named(tmp_path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        traffic.read_trace(tmp_path / "empty.jsonl")
    with pytest.raises(ConfigError, match=r"missing\.jsonl' cannot be read"):
        traffic.read_trace(tmp_path / "missing.jsonl")
