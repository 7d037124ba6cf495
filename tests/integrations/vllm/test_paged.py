"""The hooks over pages give what those over a request's own KV give."""

from __future__ import annotations

import pytest
import torch

from kvboost.integrations.vllm.paged import GatheredMass, GatheredRows, GatheredShift
from kvboost.integrations.vllm.pages import Pages
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Rules
from kvboost.reuse.paged.hooks import EnoughLayers
from kvboost.reuse.probe import AttentionMass, Bands
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift, Spans
from support.made_up_pages import BLOCKS, DIM, FORMS, KV_HEADS, LAYERS, PAGE

ROWS, HEADS = 4 * PAGE, 6
TABLE = torch.tensor([5, 2, 6, 3])
each_form = pytest.mark.parametrize("form", FORMS)


def both(form: str) -> tuple[Pages, GatheredRows, RequestKV]:
    """The same random rows in pages and on their own."""
    pages = FORMS[form]()
    kv = RequestKV(KVShape(LAYERS, KV_HEADS, DIM, torch.float32, torch.device("cpu")), ROWS)
    kv.data.copy_(torch.randn(kv.data.shape))
    noise = torch.randn(2, LAYERS, KV_HEADS, BLOCKS * PAGE, DIM)
    pages.write_all(noise, torch.arange(BLOCKS * PAGE))
    slots = pages.slots(TABLE, torch.arange(ROWS))
    pages.write_all(kv.data[:, :, :, :ROWS], slots)
    return pages, GatheredRows(pages, slots), kv


@each_form
def test_a_layer_of_pages_looks_like_rows(form: str) -> None:
    _, rows, kv = both(form)
    rows.gather(1)
    for mine, its in zip(rows.layer(1, 3, 20), kv.layer(1, 3, 20), strict=True):
        assert torch.equal(mine, its)
    assert (rows.shape, rows.capacity) == (kv.shape, ROWS)


@each_form
def test_the_probe_sees_the_same_attention(form: str) -> None:
    _, rows, kv = both(form)
    query = torch.randn(ROWS, HEADS, DIM)  # the last five rows ask
    start = ROWS - 5
    absent = torch.zeros(start, dtype=torch.bool)
    absent[4:9] = True
    mine, its = (AttentionMass(Bands(range(1), range(1, 2)), absent) for _ in range(2))
    hook = GatheredMass(mine, rows, 5)
    its.kv = kv
    rules = Rules(0.3, sinks=torch.linspace(-1, 4, HEADS))
    for layer in range(LAYERS):
        its.on_query(layer, query[-5:], rules)
    hook.on_fresh(0, query, query)
    hook.on_query(0, query, rules)
    with pytest.raises(EnoughLayers):
        hook.on_query(1, query, rules)
    assert its.mass.sum() > 1
    assert torch.allclose(mine.mass, its.mass, atol=1e-6)


@each_form
def test_the_shift_changes_the_same_rows(form: str) -> None:
    pages, rows, kv = both(form)
    before = pages.read_all(torch.arange(BLOCKS * PAGE))
    spans = Spans.of([range(5, 15), range(20, 29)], ROWS)
    positions = torch.tensor([1, 6, 7, 12, 21, 25, 30])
    rotation = Rotation(torch.rand(LAYERS, DIM // 2))
    hook = GatheredShift(Shift(rotation, positions, spans), rows)
    its = Shift(rotation, positions, spans)
    its.kv = kv
    fresh = torch.randn(2, LAYERS, len(positions), KV_HEADS, DIM)
    for layer in range(LAYERS):
        hook.on_fresh(layer, *fresh[:, layer])
        hook.on_query(layer, fresh[0, layer], Rules(0.3))
        its.on_fresh(layer, *fresh[:, layer])
    slots = pages.slots(TABLE, torch.arange(ROWS))
    after = pages.read_all(slots)
    assert torch.allclose(after, kv.data[:, :, :, :ROWS], atol=1e-6)
    assert not torch.equal(after[:, 1], before[:, 1, :, slots])
    others = torch.ones(BLOCKS * PAGE, dtype=torch.bool)
    others[slots[5:29]] = False
    untouched = pages.read_all(torch.arange(BLOCKS * PAGE))[:, :, :, others]
    assert torch.equal(untouched, before[:, :, :, others])
    assert torch.equal(after[:, 0], before[:, 0, :, slots])
