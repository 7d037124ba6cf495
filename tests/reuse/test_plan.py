from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import SpanKind
from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from kvboost.cache.quantize import KVData, Quantizer, plain
from kvboost.config import LEAST_MOVED
from kvboost.reuse.assemble import place
from kvboost.reuse.plan import LEAST_TOKENS, choose, make_plan
from kvboost.reuse.rope import Rotation
from support.chunks import make_chunk


def chunk(name: str, base: int, length: int, lineage: Lineage = Lineage.EXACT) -> ChunkInfo:
    return make_chunk(range(length), key=name, position=base, lineage=lineage).info


def hits_of(lengths: list[int]) -> tuple[Hit, ...]:
    starts = itertools.accumulate(lengths, initial=0)
    return tuple(
        Hit(chunk(f"chunk{start}", start, length + 3), start, length)
        for start, length in zip(starts, lengths, strict=False)
    )


def run(
    start: int, end: int, resemblance: float = 0.0, lineage: Lineage = Lineage.EXACT
) -> MovedRun:
    name = f"{start}-{end}-{resemblance}-{lineage.value}"
    return MovedRun((Hit(chunk(name, 7, end - start, lineage), start, end - start),), resemblance)


@given(
    st.lists(st.integers(1, 20), max_size=5),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 120)), max_size=8),
    st.integers(1, 20),
)
def test_spans_cover_the_prompt_without_gaps(lengths, moved, rest) -> None:
    hits = hits_of(lengths)
    known = sum(lengths)
    runs = tuple(run(known + start, known + start + length) for start, length in moved)
    end = max([known, *(one.end for one in runs)]) + rest
    plan = make_plan(end, KnownRows(hits, (), runs))
    spans = plan.spans
    assert spans[0].start == 0 and spans[-1].end == end
    assert all(left.end == right.start for left, right in itertools.pairwise(spans))
    assert spans[-1].kind is SpanKind.COMPUTE and spans[-1].num_tokens >= rest
    used = known >= LEAST_TOKENS
    exact = [span.donor for span in spans if span.kind is SpanKind.EXACT]
    assert exact == [hit.chunk.key for hit in hits if used]
    assert plan.exact_rows == min([one.start for one in plan.moved], default=sys.maxsize)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150)), max_size=10))
def test_chosen_runs_do_not_overlap_and_leave_no_long_known_run_to_compute(places) -> None:
    runs = [run(start, start + length) for start, length in places]
    chosen = choose(runs)
    assert all(left.end <= right.start for left, right in itertools.pairwise(chosen))
    covered = {row for one in chosen for row in range(one.start, one.end)}
    for one in runs:
        left = [row not in covered for row in range(one.start, one.end)]
        assert max((len(list(g)) for free, g in itertools.groupby(left) if free), default=0) < (
            LEAST_MOVED
        )


def test_a_donor_with_the_same_context_wins_and_exact_wins_over_approximate() -> None:
    near, far = run(0, 64, 0.9), run(0, 64, 0.1)
    assert choose([far, near]) == (near,)
    exact, approximate = run(0, 64), run(0, 64, lineage=Lineage.APPROXIMATE)
    assert choose([approximate, exact]) == (exact,)
    longer = run(0, 200, lineage=Lineage.APPROXIMATE)
    assert choose([exact, longer])[0].end == 200


def test_a_donor_in_memory_wins_over_one_in_a_folder() -> None:
    here, there = run(0, 64), run(0, 64, 0.9)
    there = MovedRun(tuple(hit._replace(tier="disk") for hit in there.hits), 0.9)
    assert choose([there, here]) == (here,)


def test_clipping_a_run_keeps_rows_and_donors_together() -> None:
    whole = MovedRun((Hit(chunk("a", 50, 40), 100, 40), Hit(chunk("b", 90, 40), 140, 40)), 0.5)
    part = whole.clip(130, 150)
    assert [(hit.start, hit.num_tokens, hit.offset) for hit in part.hits] == [
        (130, 10, 30),
        (140, 10, 0),
    ]
    assert all(hit.distance == 50 for hit in part.hits)


class Rows:
    def __init__(self, num_tokens: int, dim: int = 1) -> None:
        self.data = torch.full((2, 2, 1, num_tokens, dim), -1.0)

    def rows(self, start: int, end: int) -> torch.Tensor:
        return self.data[:, :, :, start:end]

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        yield self.rows(start, end)


def counted(base: int, length: int, dim: int = 1) -> KVData:
    """Rows that say which position they were computed at."""
    kv = torch.arange(base, base + length).float().view(1, 1, 1, -1, 1)
    return plain(kv.expand(2, 2, 1, length, dim).contiguous())


def test_exact_rows_are_copied_to_their_positions() -> None:
    kv = Rows(40)
    for hit in make_plan(30, KnownRows(hits_of([16, 7]))).hits:
        place(hit, counted(hit.start, hit.num_tokens), kv, Quantizer(16, None))
    expected = torch.cat([torch.arange(23.0), torch.full((17,), -1.0)])
    assert torch.equal(kv.data, expected.view(1, 1, 1, 40, 1).expand_as(kv.data))


def test_moved_values_are_copied_and_keys_rotated() -> None:
    kv = Rows(80, dim=2)
    packer = Quantizer(16, Rotation(torch.full((2, 1), 0.5)))
    place(Hit(chunk("a", 3, 45), 20, 40, 2), counted(3, 45, dim=2), kv, packer)
    keys, values = kv.rows(20, 60)
    assert torch.equal(values[0, 0, :, 0], torch.arange(5.0, 45.0))
    turn = torch.tensor(15 * 0.5)
    assert torch.allclose(keys[0, 0, 1, 0], 6 * (turn.cos() - turn.sin()), atol=1e-5)
    assert (kv.rows(0, 20) == -1).all() and (kv.rows(60, 80) == -1).all()
