"""Moved text on our kernels, against torch."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Rules, rows_first
from kvboost.model.native import moved_rows
from kvboost.model.native.moved_rows import RecomputedRows, move_keys
from kvboost.reuse.probe import AttentionMass, Bands
from kvboost.reuse.rope import Rotation
from support.kernel_forms import CPU, close, each_dtype


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moved_rows, "serves", lambda _: False)


def mass_of(kv: RequestKV, query: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Over all three layers, of which the last has sinks."""
    sinks = torch.linspace(-1, 4, query.shape[1])
    mass = AttentionMass(Bands(range(1), range(1, 3)), absent)
    mass.kv = kv
    for layer in range(3):
        mass.on_query(layer, rows_first(query), Rules(0.2, sinks=sinks if layer == 2 else None))
    return mass.mass


@each_dtype
@pytest.mark.parametrize(("start", "rows"), [(1, 1), (5, 3), (64, 64), (515, 37), (1000, 130)])
@pytest.mark.parametrize(("dim", "heads"), [(64, 9), (128, 3), (32, 24)])
def test_the_mass_equals_torchs(
    dtype: torch.dtype, start: int, rows: int, dim: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(start)
    kv = RequestKV(KVShape(3, 3, dim, dtype, CPU), start + rows)
    kv.data.copy_(torch.randn(kv.data.shape))
    query = torch.randn(1, rows, heads, dim).to(dtype).transpose(1, 2)  # as in a layer
    absent = torch.rand(start) < 0.2
    kv.data[:, :, :, :start][:, :, :, absent] = float("nan")  # not written
    given = mass_of(kv, query, absent)
    assert torch.isfinite(given).all() and (given[..., absent] == 0).all()
    kv.data.nan_to_num_()  # torch would multiply it by zero
    without_kernels(monkeypatch)
    expected = mass_of(kv, query, absent)
    if dtype == torch.float32:
        assert torch.allclose(given, expected, atol=1e-6, rtol=1e-4)
    assert torch.allclose(given, expected, atol=2e-3, rtol=0.03)
    assert float(given.sum()) == pytest.approx(float(expected.sum()), rel=0.005)


@each_dtype
def test_the_mass_is_the_same_on_every_call(dtype: torch.dtype) -> None:
    """The rows to recompute are chosen by it."""
    kv = RequestKV(KVShape(3, 3, 64, dtype, CPU), 1100)
    kv.data.copy_(torch.randn(kv.data.shape))
    query, absent = torch.randn(1, 9, 64, 64).to(dtype), torch.zeros(1000, dtype=torch.bool)
    once = mass_of(kv, query, absent)
    assert all(torch.equal(mass_of(kv, query, absent), once) for _ in range(20))


@each_dtype
def test_the_shift_equals_torchs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, dim, rows, blocks = 3, 64, 200, 4
    torch.manual_seed(2)
    ours = RequestKV(KVShape(2, heads, dim, dtype, CPU), rows)
    ours.data.copy_(torch.randn(ours.data.shape))
    theirs = RequestKV(ours.shape, rows)
    theirs.data.copy_(ours.data)
    before = ours.data.clone()
    # Fresh rows of a segment, of which some belong to moved text.
    fresh = torch.randn(2, 1, 50, heads, dim).to(dtype).transpose(2, 3)
    fresh[:, :, :, 4] *= 9  # it counts less than the others
    index = torch.tensor([1, 4, 5, 30, 49])
    which = torch.tensor([0, 0, 2, 3, 3])
    cos, sin = torch.rand(2, len(index), dim)
    recomputed = RecomputedRows(index, 3 * index + 2, rows, which, blocks, 2, 4.0, cos, sin)
    offset_of = torch.randint(0, blocks + 1, (150,))
    rotation = tuple(torch.randn(2, 150, dim).to(dtype))

    def run(kv: RequestKV) -> tuple[torch.Tensor, ...]:
        sums, counts = moved_rows.errors(kv, 1, *fresh, recomputed)
        by_cos, by_sin, of_values = torch.nn.functional.pad(sums, (0, 0, 0, 1))
        moved_rows.shift(kv, 1, 20, offset_of, (by_cos, by_sin), rotation, of_values)
        return by_cos, by_sin, of_values, counts

    given = run(ours)
    counts = given[-1]
    assert (counts[..., 0] > 0.8).all() and (counts[..., 0] < 1.1).all()  # of two rows
    without_kernels(monkeypatch)
    for mine, reference in zip(given, run(theirs), strict=True):
        assert torch.allclose(mine, reference, atol=1e-5)
    assert close(ours.data, theirs.data, 5)
    changed = (ours.data != before).any(dim=(0, 2, 4))  # [layers, rows]
    expected = torch.zeros_like(changed)
    expected[1, 20:170] = torch.isin(offset_of, which)  # the others' offset is zero
    assert torch.equal(changed, expected)


@each_dtype
@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (128, 64), (64, 16)])
def test_keys_are_moved_as_torch_moves_them(dtype: torch.dtype, dim: int, pairs: int) -> None:
    frequencies = torch.rand(4, pairs)
    keys = torch.randn(4, 3, 70, dim).to(dtype)[:, :, 9:50]
    wide = torch.full((4, 3, 100, dim), 7.0, dtype=dtype)
    out, expected = wide[:, :, 20:61], torch.empty(4, 3, 41, dim, dtype=dtype)
    calls = []

    def kernel(*arguments: torch.Tensor) -> bool:
        calls.append(move_keys(*arguments))
        return calls[-1]

    Rotation(frequencies, kernel=kernel).move(keys, -1234, out)
    Rotation(frequencies).move(keys, -1234, expected)
    assert calls == [True]
    limits = {"rtol": 2**-7, "atol": 2**-9} if dtype == torch.bfloat16 else {"atol": 1e-5}
    assert torch.allclose(out, expected, **limits)
    assert torch.equal(out[..., 2 * pairs :], keys[..., 2 * pairs :])
    assert (wide[:, :, :20] == 7).all() and (wide[:, :, 61:] == 7).all()


@each_dtype
def test_torch_moves_other_layouts(dtype: torch.dtype) -> None:
    frequencies = torch.rand(2, 16)
    keys = torch.randn(2, 3, 5, 64).to(dtype)
    out = torch.empty_like(keys)
    assert not move_keys(keys.half(), (frequencies, frequencies), out.half())
    assert not move_keys(keys.half(), (frequencies, frequencies), out)
    assert not move_keys(keys, (frequencies[:, :8], frequencies[:, :8]), keys.clone())
    assert not move_keys(keys[..., :32], (frequencies, frequencies), keys[..., 32:].clone())
    tall = torch.randn(3, 3, 5, 64).to(dtype)
    assert not move_keys(tall, (frequencies, frequencies), tall.clone())  # angles of two layers
    called = Rotation(frequencies, interleaved=True, kernel=lambda *_: pytest.fail("called"))
    called.move(keys, 5, out)
    assert not torch.equal(out, keys)
