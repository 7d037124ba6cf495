"""Stored rows in a request's pages, placed in one launch, against rows placed hit by hit."""

from __future__ import annotations

import pytest
import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData, Quantizer
from kvboost.model import triton
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import Slab
from kvboost.reuse.assemble import Packer
from kvboost.reuse.request import BufferedRows
from kvboost.reuse.rope import Rotation
from support.chunks import make_chunk
from support.tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from kvboost.model.triton import move
from kvboost.reuse.paged.forwards import SlabPages
from kvboost.reuse.paged.kernels import GpuKernels
from kvboost.reuse.paged.request import PagedRequest

LAYERS, HEADS, DIM, ROWS = 2, 2, 16, 150
ROTATIONS = {
    "alike": Rotation(torch.rand(1, 8).expand(LAYERS, 8)),
    "by layer": Rotation(torch.tensor([[0.3], [0.0]]).expand(LAYERS, 8).clone()),
    "neighbours": Rotation(torch.rand(1, 6).expand(LAYERS, 6), interleaved=True),
    "none": None,
}


class Counted:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches = 0
        launch = move.move

        def counting(*args: object, **options: object) -> None:
            self.launches += 1
            launch(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(move, "move", counting)


def chunks(dtype: torch.dtype, *, moved: bool, quantizer: Quantizer) -> list[tuple[Hit, KVData]]:
    """Exact rows, then perhaps some that come from other positions; parts of chunks too."""
    torch.manual_seed(4)
    found = []
    for position, count, start, offset, used in [
        (0, 40, 0, 0, 40),
        (40, 30, 40, 0, 21),
        *([(500, 64, 70, 3, 50), (9, 20, 125, 0, 20)] if moved else []),
    ]:
        rows = torch.randn(2, LAYERS, HEADS, count, DIM).to(DEVICE, dtype)
        data = quantizer.pack(rows, position)
        chunk = make_chunk(range(count), position=position, data=data)
        found.append((Hit(chunk.info, start, used, offset), data))
    return found


def place_both(
    rotation: Rotation | None,
    hits: list[tuple[Hit, KVData]],
    dtype: torch.dtype,
    copies: list[tuple[Hit, KVData]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places ``hits``, and mixes ``copies`` with them in equal shares."""
    shape = KVShape(LAYERS, HEADS, DIM, dtype, torch.device(DEVICE))
    slab = Slab(shape, num_pages=12, num_requests=2)
    slab.take(60)
    holding = slab.take(ROWS)
    assert holding is not None
    quantizer = Quantizer(16, rotation)
    paged, plain = PagedKV(slab, holding), RequestKV(shape, ROWS)
    kernels = GpuKernels(SlabPages(slab), rotation)
    for rows in (
        PagedRequest(paged, kernels, Packer(quantizer), 64),
        BufferedRows(plain, Packer(quantizer), rotation),
    ):
        for hit, data in hits:
            rows.place(hit, data)
        for hit, data in copies or []:
            rows.place(hit, data, 0.5)
        rows.finish()
    return paged.rows(0, ROWS), plain.rows(0, ROWS)


@pytest.mark.parametrize("kind", [*ROTATIONS, "bfloat16"])
def test_exact_rows_keep_their_bits_and_moved_ones_rotate(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    rotation, counted = ROTATIONS.get(kind, ROTATIONS["alike"]), Counted(monkeypatch)
    hits = chunks(dtype, moved=rotation is not None, quantizer=Quantizer(16, rotation))
    found, expected = place_both(rotation, hits, dtype)
    assert counted.launches == 1
    assert torch.equal(found[:, :, :, :61], expected[:, :, :, :61])
    assert torch.equal(found[1], expected[1])
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bits", [16, 8])
def test_copies_are_mixed_with_what_is_in_place(bits: int) -> None:
    rotation = ROTATIONS["neighbours"]
    quantizer = Quantizer(bits, rotation)
    hits, copies = (chunks(torch.float32, moved=True, quantizer=quantizer) for _ in range(2))
    found, expected = place_both(rotation, hits, torch.float32, copies)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    if bits == 8:  # without the kernel, which is interpreted slowly
        first, second = (place_both(rotation, one, torch.float32)[1] for one in (hits, copies))
        torch.testing.assert_close(expected, (first + second) / 2, rtol=1e-5, atol=1e-5)


def test_quantized_rows_are_placed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, counted = ROTATIONS["alike"], Counted(monkeypatch)
    hits = chunks(torch.float32, moved=True, quantizer=Quantizer(8, rotation))
    found, expected = place_both(rotation, hits, torch.float32)
    assert counted.launches == 0
    assert torch.equal(found, expected)


def test_rows_are_placed_with_one_copy_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def counting(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(host.numel())
        return host.to(device)

    monkeypatch.setattr(move, "send", counting)
    rotation = ROTATIONS["by layer"]
    hits = chunks(torch.float32, moved=True, quantizer=Quantizer(16, rotation))
    found, expected = place_both(rotation, hits, torch.float32)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5) and len(sent) == 1
