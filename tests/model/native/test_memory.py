"""Memory for rearranged weights."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch

from kvboost.model import native
from kvboost.model.native.memory import ALIGNMENT, PAGE, REGION, LargePages

pytestmark = pytest.mark.skipif(
    not native.is_available(torch.float32), reason="no float32 kernels on this machine"
)


def test_parts_are_aligned_apart_and_inside_their_region() -> None:
    pages, library = LargePages(), native.library(torch.float32)
    sizes = [100, 64, REGION // 2, REGION // 2, 3 * REGION, 5]
    parts = [(*pages.take(size, library), size) for size in sizes]
    taken = sorted((address, address + size) for _, address, size in parts)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken))
    for region, address, size in parts:
        assert address % ALIGNMENT == 0
        assert region.data_ptr() <= address and address + size <= region.data_ptr() + region.nbytes
    assert parts[0][0] is parts[1][0] is parts[2][0]


def test_a_full_region_is_freed_with_its_last_part() -> None:
    pages, library = LargePages(), native.library(torch.float32)
    region, _ = pages.take(REGION - PAGE // 2, library)
    freed = weakref.ref(region)
    del region
    gc.collect()
    assert freed() is None
