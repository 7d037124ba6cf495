from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import ChunkWindow, Rules, rows_first
from kvboost.reuse import probe
from kvboost.reuse.probe import END_ROWS, KINDS, AttentionMass, Bands, Deviation

HEADS, KV_HEADS, ROWS, START, DIM = 4, 2, 7, 20, 8


def filled_kv() -> RequestKV:
    """The same random keys and values in every layer; no kernel serves heads this small."""
    kv = RequestKV(KVShape(5, KV_HEADS, DIM, torch.float32, torch.device("cpu")), START + ROWS)
    kv.data.copy_(torch.randn(kv.data[:, :1].shape).expand_as(kv.data))
    return kv


@pytest.mark.parametrize(
    ("window", "softcap", "sinks"),
    [
        (None, None, None),
        (7, None, None),
        (ChunkWindow(16), None, None),
        (7, None, [1.0, -1, 3, 2]),
        (None, 0.5, None),
    ],
)
@pytest.mark.parametrize("at_once", [1 << 24, 1])  # all heads together, or one after the other
def test_attention_mass_is_the_weight_each_row_receives(
    window, softcap, sinks, at_once, monkeypatch
) -> None:
    monkeypatch.setattr(probe, "_SCORES", at_once)
    kv, query = filled_kv(), torch.randn(1, HEADS, ROWS, DIM)
    absent = torch.zeros(START, dtype=torch.bool)
    absent[3:6] = True
    mass = AttentionMass(Bands(range(1, 3), range(2, 4)), absent)
    mass.kv = kv
    last = None if sinks is None else torch.tensor(sinks)
    for layer in range(5):  # layer 1 is early, layers 2 and 3 are late
        mass.on_query(layer, rows_first(query), Rules(0.3, window, softcap, last))
    expected = torch.zeros(KINDS, START)
    for head in range(HEADS):
        for row in range(ROWS):
            keys = kv.rows(0, START + ROWS)[0, 0, head // 2]
            scores = keys @ query[0, head, row] * 0.3
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            for position in range(START + ROWS):
                seen = position <= START + row and not (position < START and absent[position])
                nearest = 0 if window is None else START + row - window + 1
                if isinstance(window, ChunkWindow):
                    nearest = (START + row) // window * window
                if not seen or position < nearest:
                    scores[position] = float("-inf")
            scores = scores if last is None else torch.cat([scores, last[head, None]])
            counted = torch.tensor([1, row >= ROWS - END_ROWS, row == ROWS - 1])[:, None]
            expected += counted * scores.softmax(0)[:START] / HEADS
    assert torch.allclose(mass.mass, torch.stack([expected, 2 * expected]), atol=1e-5)
    assert (mass.mass[..., 3:6] == 0).all()


def test_deviation_is_the_distance_of_fresh_and_known_rows_in_one_layer() -> None:
    kv = filled_kv()
    positions = torch.tensor([2, 9])
    fresh = torch.randn(2, 1, KV_HEADS, 2, DIM)
    deviation = Deviation(1, positions)
    deviation.kv = kv
    deviation.on_fresh(0, torch.zeros(1), torch.zeros(1))  # another layer
    deviation.on_fresh(1, *map(rows_first, fresh))
    keys, values = kv.data[:, :1, :, positions]
    expected = (fresh[0] - keys).square().sum((0, 1, 3))
    expected += (fresh[1] - values).square().sum((0, 1, 3))
    assert torch.allclose(deviation.squared, expected)
