"""The start-up check: a forward of ours through gaps must give what a plain forward gives.

Whatever differs in a version, a layout or a model shows here as numbers that differ, and moved
reuse is then off. Pages are free at the start, so any of them serve as scratch.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.ranks import Ranks
from kvboost.integrations.vllm.sparse import SparseForward
from kvboost.reuse.rope import Rotation

ROWS = 256
DISTANCE = 101
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""The largest difference that is due to rounding, relative to the numbers' size."""


def find_problem(
    pages: Pages,
    forward: SparseForward,
    rotation: Rotation,
    vocab_size: int,
    ranks: Ranks | None = None,
) -> str | None:
    """Why moved reuse would be wrong here or on another of ``ranks``; None if it is right."""
    ranks = ranks or Ranks()
    needed = -(-ROWS // pages.size)
    if pages.num_blocks < 2 * needed + 1:
        return f"the KV cache has only {pages.num_blocks} pages; the check needs {2 * needed + 1}"
    limit = TOLERANCE.get(pages.dtype)
    if limit is None:
        return f"KV in {pages.dtype} is not supported"
    # Page 0 is vLLM's own.
    plain, gapped = (
        torch.arange(1 + start, 1 + start + needed, device=pages.device) for start in (0, needed)
    )
    rng = np.random.default_rng(0)
    ids = torch.from_numpy(rng.integers(0, vocab_size, ROWS))
    rows = torch.arange(ROWS)
    on_device = rows.to(pages.device)
    forward(ids, rows, plain, stock=True)
    expected = pages.read_all(pages.slots(plain, on_device))
    missing = torch.from_numpy(rng.random(ROWS) < 0.5)
    pages.write_all(expected, pages.slots(gapped, on_device))
    hole = missing.to(pages.device)
    pages.write_all(torch.zeros_like(expected[:, :, :, hole]), pages.slots(gapped, on_device[hole]))
    computed = forward.num_rows
    forward(ids[missing], rows[missing], gapped)
    if forward.num_rows - computed != int(missing.sum()):
        return "the forward through gaps did not run"
    got = pages.read_all(pages.slots(gapped, on_device))
    if (error := -ranks.least(-_difference(got, expected))) > limit:
        return f"a forward through gaps differs from a plain one by {error:.2g}"
    forward(ids.roll(DISTANCE), rows, gapped)
    there = pages.read_all(pages.slots(gapped, on_device))[0, :1, :, DISTANCE:]
    # The first layer's keys depend on the token alone.
    moved = _moved(rotation, expected[0], DISTANCE)[:1]
    if (error := -ranks.least(-_difference(moved, there))) > limit:
        return f"keys rotated to another position differ from computed ones by {error:.2g}"
    # Rows of one token: whatever attention weighs, its values are the same, so the rows of a layer
    # differ in little but the rotation of their keys: in the share that sinks take, and rounding.
    forward(ids[:1].expand(ROWS), rows, gapped)
    keys = pages.read_all(pages.slots(gapped, on_device))[0]
    before, there = keys[:, :, :-DISTANCE], keys[:, :, DISTANCE:]
    for layer, moved in enumerate(_moved(rotation, keys, DISTANCE)):
        error = _difference(moved, there[layer])
        change = _difference(before[layer], there[layer])
        is_right = error <= max(limit, change / 2) < float("inf")
        if ranks.least(is_right) == 0:
            return f"layer {layer} rotates keys in another way than it should: {error:.2g} are off"
    return None


def _moved(rotation: Rotation, keys: torch.Tensor, distance: int) -> torch.Tensor:
    """The first ``keys``, ``[layers, kv_heads, rows, dim]``, at the places of the last ones."""
    before = keys[:, :, :-distance]
    moved = torch.empty_like(before)
    rotation.move(before, distance, moved)
    return moved


def measure(
    pages: Pages, forward: SparseForward, vocab_size: int, most_rows: int
) -> list[tuple[int, int, float]]:
    """Times a few forwards: rows, keys, seconds. The first run of a size is not counted."""
    synchronize = torch.cuda.synchronize if pages.on_gpu else lambda: None
    measured = []
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, vocab_size, most_rows))
    rows, table = torch.arange(most_rows), torch.arange(1, 1 + -(-most_rows // pages.size))
    table = table.to(pages.device)
    for number in (most_rows // 16, most_rows // 4, most_rows):
        for is_warm in (False, True):
            synchronize()
            started = time.perf_counter()
            forward(ids[:number], rows[:number], table)
            synchronize()
            if is_warm:
                measured.append((number, number // 2, time.perf_counter() - started))
    return measured


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest distance of all layers, relative to the length of ``right``."""
    left, right = (part.float().flatten(-3) for part in (left, right))
    distance = (left - right).norm(dim=-1) / right.norm(dim=-1).clamp(min=1e-12)
    return float(distance.nan_to_num(nan=float("inf")).max())
