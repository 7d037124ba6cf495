"""The hooks over pages give what those over a request's own KV give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvboost.integrations.vllm.paged import OfLastRows, PageRows
from kvboost.integrations.vllm.pages import Pages
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Rules
from kvboost.reuse.probe import AttentionMass, Bands
from kvboost.reuse.request import HookedRows
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Spans
from support.made_up_pages import BLOCKS, DIM, FORMS, KV_HEADS, LAYERS, PAGE

ROWS, HEADS = 4 * PAGE, 6
TABLE = torch.tensor([5, 2, 6, 3])
each_form = pytest.mark.parametrize("form", FORMS)


def both(form: str) -> tuple[Pages, PageRows, RequestKV]:
    """The same random rows in pages and on their own."""
    pages = FORMS[form]()
    kv = RequestKV(KVShape(LAYERS, KV_HEADS, DIM, torch.float32, torch.device("cpu")), ROWS)
    kv.data.copy_(torch.randn(kv.data.shape))
    noise = torch.randn(2, LAYERS, KV_HEADS, BLOCKS * PAGE, DIM)
    pages.write_all(noise, torch.arange(BLOCKS * PAGE))
    slots = pages.slots(TABLE, torch.arange(ROWS))
    pages.write_all(kv.data[:, :, :, :ROWS], slots)
    return pages, PageRows(pages, TABLE, ROWS), kv


@each_form
def test_a_layer_of_pages_looks_like_rows(form: str) -> None:
    _, rows, kv = both(form)
    for mine, its in zip(rows.layer(1, 3, 20), kv.layer(1, 3, 20), strict=True):
        assert torch.equal(mine, its)
    assert rows.shape == kv.shape


@each_form
def test_the_probe_sees_the_same_attention(form: str) -> None:
    _, rows, kv = both(form)
    query = torch.randn(ROWS, HEADS, DIM)  # the last five rows ask
    start = ROWS - 5
    absent = torch.zeros(start, dtype=torch.bool)
    absent[4:9] = True
    mine, its = (AttentionMass(Bands(range(1), range(1, 2)), absent) for _ in range(2))
    hook = OfLastRows(HookedRows(rows, None).probe(mine, torch.arange(start, ROWS)), 5)
    its.kv = kv
    rules = Rules(0.3, sinks=torch.linspace(-1, 4, HEADS))
    for layer in range(LAYERS):
        its.on_query(layer, query[-5:], rules)
    hook.on_fresh(0, query, query)
    for layer in range(LAYERS):
        hook.on_query(layer, query, rules)
    assert its.mass.sum() > 1
    assert torch.allclose(mine.mass, its.mass, atol=1e-6)


@each_form
def test_the_shift_changes_the_same_rows(form: str) -> None:
    pages, rows, kv = both(form)
    before = pages.read_all(torch.arange(BLOCKS * PAGE))
    spans = Spans.of([range(5, 15), range(20, 29)], ROWS)
    positions = np.array([1, 6, 7, 12, 21, 25, 30])
    rotation = Rotation(torch.rand(LAYERS, DIM // 2))
    hook, its = (HookedRows(one, rotation).shift(positions, spans) for one in (rows, kv))
    assert hook is not None and its is not None
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
