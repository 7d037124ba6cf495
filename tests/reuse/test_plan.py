from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import SpanKind
from kvboost.cache.chunk import KVChunk, Lineage
from kvboost.cache.store import Hit
from kvboost.reuse.assemble import place
from kvboost.reuse.plan import LEAST_TOKENS, exact_prefix
from kvboost.tokens.hashing import ChunkKey, as_token_ids


def hits_of(lengths: list[int]) -> list[Hit]:
    hits, start = [], 0
    for number, length in enumerate(lengths):
        kv = torch.arange(start, start + length + 3).float().view(1, 1, 1, -1, 1)
        kv = kv.expand(2, 2, 1, length + 3, 1).contiguous()
        ids = as_token_ids(range(length + 3))
        key, parent = ChunkKey(f"chunk{number}"), ChunkKey("root")
        hits.append(Hit(KVChunk(key, parent, ids, kv, start, Lineage.EXACT), start, length))
        start += length
    return hits


@given(st.lists(st.integers(1, 20), max_size=5), st.integers(1, 20))
def test_spans_cover_the_prompt_without_gaps(lengths, rest) -> None:
    hits = hits_of(lengths)
    spans = exact_prefix(sum(lengths) + rest, hits)
    assert spans[0].start == 0
    assert spans[-1].end == sum(lengths) + rest
    assert all(left.end == right.start for left, right in itertools.pairwise(spans))
    assert spans[-1].kind is SpanKind.COMPUTE and spans[-1].num_tokens >= rest
    used = sum(lengths) >= LEAST_TOKENS
    assert [span.donor for span in spans[:-1]] == [hit.chunk.key for hit in hits if used]


def test_rows_are_put_where_they_belong() -> None:
    class Rows:
        data = torch.full((2, 2, 1, 40, 1), -1.0)

        def rows(self, start: int, end: int) -> torch.Tensor:
            return self.data[:, :, :, start:end]

    hits = hits_of([16, 7])
    kv = Rows()
    place(exact_prefix(30, hits), hits, kv)
    expected = torch.cat([torch.arange(23.0), torch.full((17,), -1.0)])
    assert torch.equal(kv.data, expected.view(1, 1, 1, 40, 1).expand_as(kv.data))
