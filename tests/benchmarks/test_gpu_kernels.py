"""The benchmark of Triton kernels calls them as they are now, and compares them with torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.tiny import DEVICE

gpu_kernels = pytest.importorskip("benchmarks.gpu_kernels")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    def once(call: Callable[[], object], *_: int) -> float:
        call()
        return 1.0

    torch.manual_seed(0)
    small = {"DEVICE": DEVICE, "DTYPE": torch.float32, "LAYERS": 2, "MODELS": {"7b": (2, 1)}}
    for name, value in (small | {"time_gpu": once, "time_host": once}).items():
        monkeypatch.setattr(gpu_kernels, name, value)


def test_stored_rows_are_moved() -> None:
    assert gpu_kernels.time_move("7b", 256, count=4)["us"] == 1.0


def test_mass_is_that_of_torch() -> None:
    assert gpu_kernels.time_mass("7b", 16, 256)["us"] == 1.0


def test_the_shift_is_that_of_torch() -> None:
    assert gpu_kernels.time_shift("7b", 40, 512, count=4)["us"] == 1.0
