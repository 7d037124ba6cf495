"""Kernels are compiled before a request waits for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.model.triton import attention, mass, move, shift
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.warm import warm_up
from support.paged_kv import make_pages, make_tables, random, scattered, tiled
from support.tiny import DEVICE

KERNELS: list[Any] = [
    attention._attend_kernel,
    attention._combine_kernel,
    mass._mass_kernel,
    move._move_kernel,
    shift._errors_kernel,
    shift._shift_kernel,
]


@pytest.mark.parametrize("joined", [False, True])
def test_every_kernel_runs_once(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = set()
    plain = type(KERNELS[0]).run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        ran.add(kernel)
        return plain(kernel, *args, **kwargs)

    monkeypatch.setattr(type(KERNELS[0]), "run", run)
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    layers = PagedLayers([make_pages(3, 1, 16, 16, dtype, "tokens first")])
    before = layers.first.clone()
    warm_up(layers, heads=2, pairs=8, blocks=2, joined=joined)
    assert ran == set(KERNELS)
    assert torch.equal(layers.first, before)  # pages of its own


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU needs compiled kernels")
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("rows", [1, 9, 70])
def test_requests_find_their_kernels_compiled(rows: int, joined: bool) -> None:
    kv_heads, rotated = (1, 64) if joined else (2, None)
    layers = PagedLayers([make_pages(20, kv_heads, 16, 64, torch.bfloat16, "tokens first")])
    warm_up(layers, heads=6, pairs=32, blocks=8, joined=joined)
    before = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in KERNELS]
    tables = make_tables(2, 10, 20)
    for parts in (1, 3):
        positions = [scattered(rows, 150), scattered(1, 33)]
        query = random(rows + 1, 6, 128 if joined else 64, dtype=torch.bfloat16)
        plan = tiled(positions, tables, query, layers.first, tile=None, parts=parts)
        attention.attend(query, layers.first, plan, 0.125, rotated=rotated)
    after = [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in KERNELS]
    assert after == before
