"""Moved text on our kernels: what torch does with it is the reference."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.kv import KVShape, RequestKV
from kvboost.model.native.build import load_library
from kvboost.model.native.moved_rows import move_keys
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.rope import Rotation

pytestmark = pytest.mark.skipif(
    isinstance(load_library(), str), reason=f"no kernels: {load_library()}"
)


def mass_of(kv: RequestKV, query: torch.Tensor, absent: torch.Tensor) -> torch.Tensor:
    """Over two layers of three."""
    mass = AttentionMass(range(1, 3), len(absent), absent)
    for layer in range(3):
        mass.on_query(layer, kv, query, 0.2, None)
    return mass.mass


@pytest.mark.parametrize(("start", "rows"), [(1, 1), (5, 3), (64, 64), (515, 37), (1000, 130)])
@pytest.mark.parametrize(("dim", "heads"), [(64, 9), (128, 3), (32, 24)])
def test_mass_is_what_torch_gives(
    start: int, rows: int, dim: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(start)
    kv = RequestKV(KVShape(3, 3, dim, torch.bfloat16, torch.device("cpu")), start + rows)
    kv.data.copy_(torch.randn(kv.data.shape))
    query = torch.randn(1, rows, heads, dim).bfloat16().transpose(1, 2)  # as a layer has it
    absent = torch.rand(start) < 0.2
    kv.data[:, :, :, :start][:, :, :, absent] = float("nan")  # nothing is there
    given = mass_of(kv, query, absent)
    assert torch.isfinite(given).all() and (given[absent] == 0).all()
    kv.data.nan_to_num_()  # which torch would multiply
    monkeypatch.setattr("kvboost.model.kv.has_kernels", lambda _: False)
    expected = mass_of(kv, query, absent)
    assert torch.allclose(given, expected, atol=2e-3, rtol=0.03)
    assert float(given.sum()) == pytest.approx(float(expected.sum()), rel=0.005)


def test_the_same_mass_every_time() -> None:
    """What is recomputed depends on it."""
    kv = RequestKV(KVShape(3, 3, 64, torch.bfloat16, torch.device("cpu")), 1100)
    kv.data.copy_(torch.randn(kv.data.shape))
    query, absent = torch.randn(1, 9, 64, 64).bfloat16(), torch.zeros(1000, dtype=torch.bool)
    once = mass_of(kv, query, absent)
    assert all(torch.equal(mass_of(kv, query, absent), once) for _ in range(20))


@pytest.mark.parametrize(("dim", "pairs"), [(64, 32), (128, 64), (64, 16)])
def test_keys_are_moved_as_torch_moves_them(dim: int, pairs: int) -> None:
    frequencies = torch.rand(4, pairs)
    keys = torch.randn(4, 3, 70, dim).bfloat16()[:, :, 9:50]
    wide = torch.full((4, 3, 100, dim), 7.0, dtype=torch.bfloat16)
    out, expected = wide[:, :, 20:61], torch.empty(4, 3, 41, dim, dtype=torch.bfloat16)
    calls = []

    def kernel(*arguments: torch.Tensor) -> bool:
        calls.append(move_keys(*arguments))
        return calls[-1]

    Rotation(frequencies, kernel=kernel).move(keys, -1234, out)
    Rotation(frequencies).move(keys, -1234, expected)
    assert calls == [True]
    assert torch.allclose(out, expected, rtol=2**-7, atol=2**-9)
    assert torch.equal(out[..., 2 * pairs :], keys[..., 2 * pairs :])
    assert (wide[:, :, :20] == 7).all() and (wide[:, :, 61:] == 7).all()


def test_other_layouts_are_torchs() -> None:
    frequencies = torch.rand(2, 16)
    keys = torch.randn(2, 3, 5, 64)
    out = torch.empty_like(keys)
    assert not move_keys(keys, (frequencies, frequencies), out)  # float32
    half = keys.bfloat16()
    assert not move_keys(half, (frequencies[:, :8], frequencies[:, :8]), half.clone())
    assert not move_keys(half[..., :32], (frequencies, frequencies), half[..., 32:].clone())
    tall = torch.randn(3, 3, 5, 64).bfloat16()
    assert not move_keys(tall, (frequencies, frequencies), tall.clone())  # turns of two layers
    called = Rotation(frequencies, interleaved=True, kernel=lambda *_: pytest.fail("asked"))
    called.move(keys, 5, out)
    assert not torch.equal(out, keys)
