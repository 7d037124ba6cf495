"""Attention over far and near rows equals attention over the same rows in one buffer."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.model.execution import attention
from kvboost.model.execution.attention import Batch, attend
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.partial_attention import attend_part
from kvboost.model.execution.segment import Segment
from kvboost.model.far.host import HostAttention
from kvboost.model.far.rows import FarRows
from kvboost.model.native.kernels import Kernels
from support.far_kv import copy_of, far_kv, late_attention

LAYERS, KV_HEADS, ROWS = 2, 2, 160


def filled(dim: int, seed: int) -> RequestKV:
    kv = RequestKV(KVShape(LAYERS, KV_HEADS, dim, torch.float32, torch.device("cpu")), ROWS)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(seed)))
    return kv


def run(kv: RequestKV, positions, query, layer, *, absent=None, window=None, kernels=None):
    """Attention of rows that are in place."""
    segment = Segment(kv, torch.zeros(len(positions)), positions, absent=absent)
    at = segment.position_ids(torch.device("cpu"))
    keys, values = (part[:, :, at] for part in kv.layer(layer, 0, segment.end))
    setattr(keys, attention.BATCH, (Batch([segment], kernels), layer))
    return attend(torch.nn.Module(), query, keys, values, None, scaling=0.3, sliding_window=window)[
        0
    ]


@settings(max_examples=60)
@given(st.data())
def test_any_split_equals_all_rows_near(data: st.DataObject) -> None:
    dim = data.draw(st.sampled_from([8, 32]))
    whole = filled(dim, data.draw(st.integers(0, 9)))
    split = data.draw(st.integers(1, ROWS - 40))
    first = data.draw(st.integers(split, ROWS - 34))
    count = data.draw(st.integers(1, 32))
    end = first + count
    heads = KV_HEADS * data.draw(st.integers(1, 3))
    has_gaps = data.draw(st.booleans()) and count > 2
    positions: range | torch.Tensor = range(first, end)
    if has_gaps:
        positions = torch.cat([torch.arange(first, end - 1)[::2], torch.tensor([end - 1])]).unique()
    absent = None
    if has_gaps and data.draw(st.booleans()):
        absent = torch.zeros(end, dtype=torch.bool)
        absent[split // 2 : split // 2 + 3] = True
        absent[positions] = False
    window = data.draw(st.sampled_from([None, 24, 70]))
    kernels = Kernels.for_shape(whole.shape) if data.draw(st.booleans()) else None
    on_gpu = kernels is None and data.draw(st.booleans())
    shape = whole.shape
    method = (
        late_attention(shape, data.draw(st.integers(8, 96))) if on_gpu else HostAttention(shape)
    )
    kv = far_kv(shape, ROWS, 40 + ROWS - split, method, on_gpu=on_gpu)
    copy_of(whole, end, split, kv, first)
    assert isinstance(kv.base, FarRows) and kv.base.count == kv.start == kv.far_rows == split
    if has_gaps and kernels is not None:  # hooks and gaps need rows in one place
        kv.detach_prefix()
    query = torch.randn(1, heads, len(positions), dim)
    layer = data.draw(st.integers(0, LAYERS - 1))
    options = {"absent": absent, "window": window, "kernels": kernels}
    found = run(kv, positions, query, layer, **options)
    assert torch.allclose(found, run(whole, positions, query, layer, **options), atol=1e-5)


def test_many_keys_are_cut_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.model.far.host.LEAST_PIECE", 32)
    monkeypatch.setattr("kvboost.model.far.host.GRID", 8)
    whole = filled(32, 2)
    host = HostAttention(whole.shape)
    query = torch.randn(1, 4, 2, 32)
    out, sums = host.attend(FarRows(whole.data, 150, host), 0, query, 0.3)
    expected = attend_part(query, *whole.layer(0, 0, 150), 0.3)
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert torch.allclose(sums, expected[1], atol=1e-5)
    if host._kernels is not None:
        assert host._plan is not None and host._plan[1].num_pieces >= 2
