from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.chunk import ChunkInfo, Lineage
from kvboost.cache.lookup.catalogue import Catalogue
from kvboost.cache.lookup.hits import Hit, MovedRun
from kvboost.tokens.hashing import as_token_ids, branch_key
from support.chunks import ROOT, make_chunk

WINDOW = 8
CHUNK = 32
# No token occurs twice: a window is in no text by chance.
PASSAGES = np.random.default_rng(0).permutation(60_000)[: 8 * 4 * WINDOW].reshape(8, 4 * WINDOW)


def store(
    catalogue: Catalogue,
    ids: Sequence[int],
    chunk_size: int = CHUNK,
    approximate: int | None = None,
) -> list[ChunkInfo]:
    """Adds the chunks of a text; those from row ``approximate`` on are a branch."""
    infos: list[ChunkInfo] = []
    parent = before = ROOT
    lineage = Lineage.EXACT
    for start in range(0, len(ids), chunk_size):
        if approximate is not None and start >= approximate and lineage is Lineage.EXACT:
            lineage, parent = Lineage.APPROXIMATE, branch_key(parent, "auto")
        infos.append(
            make_chunk(
                ids[start : start + chunk_size],
                parent=parent,
                before=before,
                position=start,
                lineage=lineage,
            ).info
        )
        parent = before = infos[-1].key
    catalogue.add(*[info for info in infos if info.key not in catalogue])
    return infos


def moved(catalogue: Catalogue, prompt: Sequence[int]) -> tuple[MovedRun, ...]:
    ids = as_token_ids(prompt)
    return catalogue.match(ROOT, ids, len(ids), "auto", lambda key: "ram").moved


def shared_rows(donor: Sequence[int], prompt: Sequence[int]) -> int:
    """The slow way: the rows of ``donor`` that lie in a window of ``prompt``, if windows begin at
    every eighth row."""
    known = {tuple(prompt[at : at + WINDOW]) for at in range(len(prompt) - WINDOW + 1)}
    starts = range(0, len(donor) - WINDOW + 1, WINDOW)
    return sum(WINDOW for at in starts if tuple(donor[at : at + WINDOW]) in known)


def joined(numbers: Sequence[int]) -> list[int]:
    return [int(token) for number in numbers for token in PASSAGES[number]]


@given(
    st.permutations(range(8)),
    st.permutations(range(8)),
    st.integers(0, 7),
    st.sampled_from([None, 32, 96]),
)
@settings(max_examples=60, deadline=None)
def test_resemblance_is_the_share_of_text_before_both(
    before: list[int], now: list[int], cut: int, approximate: int | None
) -> None:
    catalogue = Catalogue(WINDOW)
    read, prompt = joined(before), [70_000, 70_001, *joined(now[cut:])]
    store(catalogue, read, approximate=approximate)
    runs = moved(catalogue, prompt)
    assert runs
    for run in runs:
        hit = run.hits[0]
        row = hit.chunk.base_position + hit.offset
        shared = shared_rows(read[:row], prompt[: run.start])
        assert run.resemblance == pytest.approx(shared / max(run.start, row))


def test_the_same_text_in_other_chunks_counts() -> None:
    """Two agents read each other's messages: what one has read is stored after another beginning,
    in chunks of its own."""
    catalogue = Catalogue(WINDOW)
    store(catalogue, [70_000, *joined([0, 1])])
    store(catalogue, [70_001, 70_002, 70_003, *joined([0, 1, 2])], chunk_size=24)
    (run,) = moved(catalogue, [70_000, *joined([0, 1, 2])])
    assert run.start == 1 + 2 * len(PASSAGES[0])
    assert run.resemblance > 0.8


def test_text_after_the_rows_does_not_count() -> None:
    catalogue = Catalogue(WINDOW)
    store(catalogue, joined([0, 1]))
    first, second = moved(catalogue, [70_000, *joined([1, 0])])
    assert (first.resemblance, second.resemblance) == (0.0, 0.0)


def test_a_chunk_without_a_window_counts_as_other_text() -> None:
    catalogue = Catalogue(WINDOW)
    short = make_chunk([1, 2, 3]).info
    long = make_chunk(joined([0]), parent=short.key, position=3).info
    catalogue.add(short, long)
    (run,) = moved(catalogue, [1, 2, 4, 5, *joined([0])])
    assert run.hits[0] == Hit(long, 4, len(PASSAGES[0]), tier="ram")
    assert run.resemblance == 0.0
