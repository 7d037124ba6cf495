from __future__ import annotations

import json

from kvboost.cache.lookup.hits import Hit, MovedRun
from kvboost.cache.tiers.stats import TierStats
from kvboost.integrations.vllm.planner import Load, prompt_ids
from kvboost.integrations.vllm.tally import Tally, merge, usage
from kvboost.reuse.plan import Plan
from support.chunks import make_chunk


def hit(start: int, end: int) -> Hit:
    return Hit(make_chunk(range(start, end), position=start).info, start, end - start)


def load_of(name: str = "a request") -> Load:
    """Rows 0 to 32 are vLLM's; 32 to 96 exact, 96 to 128 not known, 128 to 192 moved."""
    return Load(
        name,
        prompt_ids(range(200)),
        Plan(200, (hit(32, 64), hit(64, 96)), (MovedRun((hit(128, 192),), 1.0),), num_shared=32),
        end=192,
    )


def stats_of(nbytes: int, chunks: int) -> TierStats:
    return TierStats(chunks=chunks, nbytes=nbytes, max_bytes=1000, hits=3, faults={})


def test_an_answer_separates_its_rows() -> None:
    assert usage(load_of(), recomputed=10) == {
        "exact_tokens": 64,
        "moved_tokens": 64,
        "recomputed_tokens": 10,
    }


def test_every_row_of_a_load_is_counted_once() -> None:
    tally = Tally()
    tally.start("a request")
    tally.finish(load_of(), 10)
    counted = tally.take(chunks=0)
    assert counted is not None
    tokens = counted["tokens"]
    assert tokens == {"exact": 64, "moved": 54, "recomputed": 10, "computed": 32}
    assert sum(tokens.values()) == 192 - 32
    assert counted["loads"] == {"loaded": 1}
    (seconds,) = counted["seconds"]
    assert seconds > 0
    assert tally.totals()["prompt_tokens"] == tokens
    assert tally.take(chunks=0) is None  # nothing is counted twice
    assert tally.totals()["prompt_tokens"] == tokens


def test_a_load_that_failed_has_no_rows_and_no_seconds() -> None:
    tally = Tally()
    tally.take(chunks=0)
    tally.start("a request")
    tally.finish(load_of(), 0, failed=True)
    assert tally.take(chunks=0) == {"loads": {"failed": 1}}
    assert tally.totals()["loads"] == {"loaded": 0, "failed": 1}
    assert tally.totals()["load_seconds"] == 0


def test_a_load_that_was_cancelled_is_not_counted() -> None:
    tally = Tally()
    tally.take(chunks=0)
    tally.start("a request")
    tally.cancel("a request")
    assert tally.take(chunks=0) is None


def test_what_is_held_is_told_when_it_changes() -> None:
    tally = Tally()
    assert tally.take(chunks=0) == {"chunks": 0, "tiers": {}}
    assert tally.take(chunks=0) is None
    tally.hear({0: {"ram": stats_of(100, 5)}, 1: {"ram": stats_of(110, 4)}})
    # Two workers hold the heads of the same chunks.
    held = {"ram": {"bytes": 210, "max_bytes": 2000, "chunks": 5}}
    assert tally.take(chunks=5) == {"chunks": 5, "tiers": held}
    tally.hear({})
    assert tally.take(chunks=5) is None
    tally.hear({1: {"ram": stats_of(10, 1)}})
    told = tally.take(chunks=5)
    assert told is not None and told["tiers"]["ram"]["bytes"] == 110


def test_merged_figures_are_sums_and_the_last_state() -> None:
    data = {"tokens": {"exact": 5}, "seconds": [0.5], "chunks": 7, "tiers": {"ram": {"bytes": 1}}}
    later = {"tokens": {"exact": 1, "moved": 2}, "loads": {"failed": 1}, "seconds": [0.25]}
    merge(data, later)
    merge(data, {"chunks": 8})
    assert data == {
        "tokens": {"exact": 6, "moved": 2},
        "loads": {"failed": 1},
        "seconds": [0.5, 0.25],
        "chunks": 8,
        "tiers": {"ram": {"bytes": 1}},
    }
    assert json.loads(json.dumps(data)) == data  # vLLM sends it to another process


def test_requests_that_were_put_off_are_counted() -> None:
    tally = Tally()
    tally.put_off("kept")
    tally.put_off("kept")
    tally.put_off("dropped")
    counted = tally.take(chunks=0)
    assert counted is not None and counted["put_off"] == {"kept": 2, "dropped": 1}
    assert tally.take(chunks=0) is None
