from __future__ import annotations

import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import rows_first
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import ERROR_WEIGHT, FAR_ROWS, PRIOR_ROWS, REACH, Shift, Spans
from support.rotated import rotated

ROTATION = Rotation(torch.rand(2, 2))
PROMPT = 10
SPANS = Spans.of([range(2, 6), range(6, 9)], PROMPT)


def filled_kv(tokens: int = PROMPT) -> RequestKV:
    kv = RequestKV(KVShape(2, 3, 4, torch.float32, torch.device("cpu")), tokens)
    kv.data.copy_(torch.randn(kv.data.shape))
    return kv


def fresh_rows(
    kv: RequestKV, positions: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that lie off the known ones by an ``offset``, ``[4]`` or ``[rows, 4]``, of keys where
    position plays no part."""
    turned = rotated(ROTATION, offset.expand(3, len(positions), 4), ROTATION.cos_sin(1, positions))
    keys, values = kv.data[:, 1:, :, positions]
    return rows_first(keys + turned), rows_first(values + offset)


def shift_of(kv: RequestKV, positions: torch.Tensor, spans: Spans = SPANS) -> Shift:
    shift = Shift(ROTATION, positions, spans)
    shift.kv = kv
    return shift


def test_a_shared_offset_is_carried_to_the_other_rows_of_its_span() -> None:
    kv, offset = filled_kv(), torch.tensor([1.0, -2.0, 0.5, 3.0])
    before = kv.data.clone()
    positions = torch.tensor([1, 2, 4, 5, 9])  # three rows of span 0, none of span 1
    shift = shift_of(kv, positions)
    assert shift.useful
    shift.on_fresh(1, *fresh_rows(kv, positions, offset))
    moved = kv.data - before
    weight = 3 / (3 + PRIOR_ROWS)
    at_3 = rotated(
        ROTATION, weight * offset.expand(3, 1, 4), ROTATION.cos_sin(1, torch.tensor([3]))
    )
    assert torch.allclose(moved[0, 1, :, 3:4], at_3, atol=1e-5)
    assert torch.allclose(moved[1, 1, :, 3], (weight * offset).expand(3, 4), atol=1e-5)
    # Fresh rows (2, 4, 5) are written over right after; nothing else moves.
    others = [row for row in range(kv.capacity) if row not in (2, 3, 4, 5)]
    assert (moved[:, :, :, others] == 0).all()


def test_rows_are_shifted_by_what_is_near_them() -> None:
    """One row of a span at its beginning and two at its end, computed row by row. The one with the
    largest error counts least."""
    kv, spans = filled_kv(90), Spans.of([range(5, 85)], 90)  # blocks of ten rows
    before, positions = kv.data.clone(), torch.tensor([7, 76, 83])
    offsets = torch.randn(3, 4)
    shift_of(kv, positions, spans).on_fresh(1, *fresh_rows(kv, positions, offsets))
    moved = (kv.data - before)[1, 1]
    squares = offsets.square().sum(1)
    counted = 1 / (1 + ERROR_WEIGHT * squares / squares.mean())
    for row in (5, 14, 15, 40, 84):
        blocks = (positions - 5) // 10
        near = torch.exp(-((row - 5) // 10 - blocks).abs() * 10.0 / REACH)
        weights = (near + FAR_ROWS / 3) * counted
        expected = 3 / (3 + PRIOR_ROWS) * (weights / weights.sum()) @ offsets
        assert torch.allclose(moved[:, row], expected.expand(3, 4), atol=1e-5)


def test_layer_0_and_single_rows_shift_nothing() -> None:
    kv = filled_kv()
    before = kv.data.clone()
    positions = torch.tensor([2, 3, 9])
    offset = torch.ones(4)
    shift_of(kv, positions).on_fresh(0, *fresh_rows(kv, positions, offset))
    assert torch.equal(kv.data, before)
    assert not Shift(ROTATION, torch.tensor([2, 9]), SPANS).useful
    everything = torch.arange(2, 10)
    assert not Shift(ROTATION, everything, SPANS).useful


def test_a_slice_shifts_only_its_own_rows() -> None:
    part, every = SPANS.between(4, 7).block_of.tolist(), SPANS.block_of.tolist()
    assert part == [*[-1] * 4, *every[4:7], *[-1] * 3]
