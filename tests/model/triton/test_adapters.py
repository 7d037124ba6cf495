"""What adapters add to products, row by row, against torch."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from kvboost.model.triton import adapters, fused
from kvboost.model.triton.adapters import Addition
from support import torch_kernels
from support.paged_kv import LAYOUTS, make_pages, random
from support.tiny import DEVICE

ROWS, WIDTH, RANKS, DIM = 3, 40, 2, 24
LAYOUT = next(iter(LAYOUTS))
SLOTS = torch.tensor([1, -1, 0], device=DEVICE)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs for a row, the last of which is not full."""
    monkeypatch.setattr(adapters, "SHRINK_BLOCK", 16)
    monkeypatch.setattr(adapters, "EXPAND_BLOCK", 16)
    monkeypatch.setattr(fused, "ADAPTED", 16)


def additions(parts: int, height: int) -> dict[ModuleType, Addition]:
    """The same for both kinds of kernels."""
    torch.manual_seed(0)
    rows = random(ROWS, WIDTH)
    down, up = random(2, parts * RANKS, WIDTH), random(2, RANKS, height)
    found = {}
    for kernels in (adapters, torch_kernels):
        size = adapters.num_splits(WIDTH), ROWS, parts * RANKS
        sums = torch.full(size, torch.nan, device=DEVICE)
        kernels.shrink(rows, SLOTS, down, RANKS, sums)
        found[kernels] = Addition(sums, SLOTS, up)
    return found


def check(
    parts: int, out: torch.Tensor, run: Callable[[ModuleType, torch.Tensor, Addition], torch.Tensor]
) -> None:
    """Kernels give what torch gives, and change no row without an adapter."""
    ours, expected = additions(parts, out.shape[1]).values()
    given, wanted = run(fused, out.clone(), ours), run(torch_kernels, out.clone(), expected)
    assert torch.allclose(given, wanted, rtol=1e-4, atol=1e-3)
    nobody = Addition(ours.sums, torch.full_like(SLOTS, -1), ours.up)
    plain = run(fused, out.clone(), nobody)
    assert torch.equal(plain[1], given[1]) and not torch.allclose(plain[0], given[0], atol=1e-2)


def test_one_product() -> None:
    def run(kernels: ModuleType, out: torch.Tensor, addition: Addition) -> torch.Tensor:
        (adapters if kernels is fused else torch_kernels).expand(addition, out)
        return out

    check(1, random(ROWS, WIDTH), run)


def test_a_sum_and_its_norm() -> None:
    weight, hidden = random(WIDTH), random(ROWS, WIDTH)
    check(1, random(ROWS, WIDTH), lambda kernels, out, addition: torch.cat(
        kernels.add_norm(out, weight, 1e-5, hidden, addition), 1
    ))  # fmt: skip


def test_a_gate() -> None:
    check(2, random(ROWS, 2 * WIDTH), lambda kernels, out, addition: kernels.gate(out, addition))


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_queries_keys_and_values(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if many:
        monkeypatch.setattr(fused, "MANY_ADAPTED", 1)
        monkeypatch.setattr(fused, "ROWS", 2)
    cos_sin = random(ROWS, DIM), random(ROWS, DIM)
    slots = torch.tensor([3, 18, 20], device=DEVICE)

    def run(kernels: ModuleType, out: torch.Tensor, addition: Addition) -> torch.Tensor:
        pages = make_pages(2, 1, 16, DIM, torch.float32, LAYOUT).zero_()
        parts = kernels.rotate_and_write(out, cos_sin, pages, slots, addition=addition)
        written = pages.transpose(1, 2).flatten(0, 1)[slots]
        return torch.cat([*(part.flatten(1) for part in parts), written.flatten(1)], 1)

    check(3, random(ROWS, 4 * DIM), run)
