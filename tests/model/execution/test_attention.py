"""Every path of attention equals attention written out."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost import UnsupportedModelError
from kvboost.model.execution import attention
from kvboost.model.execution.attention import attend
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import ChunkWindow, Segment

HEADS, KV_HEADS, DIM = 4, 2, 8
SHAPE = KVShape(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))


def written_out(query, keys, values, positions, window, softcap, scale, sinks=None):
    """The slow reference: one query at a time over the keys it may see. The score of a sink comes
    last; it has no value."""
    groups = HEADS // KV_HEADS
    rows = []
    for row, position in enumerate(positions.tolist()):
        first = 0 if window is None else max(0, position + 1 - window)
        if isinstance(window, ChunkWindow):
            first = position // window * window
        heads = []
        for head in range(HEADS):
            k = keys[head // groups, first : position + 1]
            v = values[head // groups, first : position + 1]
            scores = (k @ query[0, head, row]) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head, None]])
            heads.append(torch.softmax(scores, 0)[: len(v)] @ v)
        rows.append(torch.stack(heads))
    return torch.stack(rows)[None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("window", [None, 5, 100, ChunkWindow(8)])
@pytest.mark.parametrize(
    "positions",
    [
        range(20),
        range(1),
        range(19, 20),
        range(4, 20),
        range(15, 20),
        torch.tensor([2, 3, 9, 19]),
        torch.tensor([7]),
    ],
    ids=["whole", "first", "decode", "short prefix", "tail", "gaps", "one inside"],
)
def test_attention_equals_attention_written_out(
    monkeypatch, positions, window, rule, dtype
) -> None:
    softcap = 2.0 if rule == "softcap" else None
    sinks = torch.tensor([1.0, -1.0, 4.0, 2.0]) if rule == "sinks" else None
    monkeypatch.setattr("kvboost.model.execution.segment.BLOCK_ROWS", 3)
    generator = torch.Generator().manual_seed(1)
    kv = RequestKV(replace(SHAPE, dtype=dtype), 20)
    kv.data.copy_(torch.randn(kv.data.shape, generator=generator))
    segment = Segment(kv, torch.zeros(len(positions)), positions)
    ids = segment.position_ids(torch.device("cpu"))
    query = torch.randn(1, HEADS, len(positions), DIM, generator=generator).to(dtype)
    keys, values = kv.layer(0, 0, 20)
    fresh_keys, fresh_values = keys[:, :, ids], values[:, :, ids]
    setattr(fresh_keys, attention.BATCH, (attention.Batch([segment]), 0))
    module, sliding = torch.nn.Module(), window
    if isinstance(window, ChunkWindow):  # as Llama 4 says it
        module.layer_idx, sliding = 0, None
        kinds = {"layer_types": ["chunked_attention"], "attention_chunk_size": int(window)}
        module.config = SimpleNamespace(model_type="llama4_text", **kinds)
    out, _ = attend(
        module,
        query,
        fresh_keys,
        fresh_values,
        None,
        scaling=0.4,
        sliding_window=sliding,
        softcap=softcap,
        s_aux=None if sinks is None else sinks.to(dtype),
    )
    as_numbers = (query.float(), keys[0].float(), values[0].float())
    expected = written_out(*as_numbers, ids, window, softcap, 0.4, sinks)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(out.float(), expected, atol=tolerance)


def test_sinks_with_a_few_rows_at_a_time(monkeypatch) -> None:
    """The mask is repeated for the heads that share a head of keys: not for all rows at once."""
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, HEADS, 150, DIM, generator=generator)
    keys, values = torch.randn(2, 1, KV_HEADS, 150, DIM, generator=generator)
    mask = torch.full((150, 150), float("-inf")).triu(1)
    rest = query, keys, values, mask, 0.4, torch.tensor([1.0, -1.0, 4.0, 2.0])
    whole = attention._with_sinks(*rest)
    monkeypatch.setattr(attention, "MOST_WEIGHTS", 1)
    assert torch.allclose(attention._with_sinks(*rest), whole, atol=1e-6)
    expected = written_out(query, keys[0], values[0], torch.arange(150), None, None, *rest[-2:])
    assert torch.allclose(whole.transpose(1, 2), expected, atol=1e-5)


def test_a_rank_counts_the_sinks_of_its_heads() -> None:
    """transformers gives it a tensor that stands for those of all ranks."""
    kv = RequestKV(SHAPE, 20)
    kv.data.normal_(generator=torch.Generator().manual_seed(1))
    keys, values = kv.layer(0, 0, 20)
    setattr(keys, attention.BATCH, (attention.Batch([Segment(kv, torch.zeros(20), range(20))]), 0))
    rest = torch.nn.Module(), torch.ones(1, HEADS, 20, DIM), keys, values, None
    sinks = torch.tensor([1.0, -1.0, 4.0, 2.0])
    expected, _ = attend(*rest, s_aux=sinks)
    split: Any = SimpleNamespace(to_local=lambda: sinks)
    assert torch.equal(attend(*rest, s_aux=split)[0], expected)


def test_unknown_kinds_of_attention_are_refused() -> None:
    keys = torch.zeros(1, 1, 1, 1)
    setattr(keys, attention.BATCH, (attention.Batch([]), 0))
    with pytest.raises(UnsupportedModelError, match="position_bias"):
        attend(torch.nn.Module(), keys, keys, keys, None, position_bias=keys)
    with pytest.raises(UnsupportedModelError, match="sinks and a soft cap"):
        attend(torch.nn.Module(), keys, keys, keys, None, s_aux=keys, softcap=1.0)
