"""Pages of vLLM as its backends lay them out, without vLLM."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvboost.integrations.vllm.pages import Pages

BLOCKS, KV_HEADS, PAGE, DIM, LAYERS = 7, 3, 8, 4, 2
Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


def plain_write(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As GPU backends: keys and values side by side in every row."""
    cache[slots // PAGE, :, slots % PAGE] = torch.cat([keys, values], -1)


def packed_write(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """As the CPU backend: in every head the keys of a page, then its values; keys are packed in
    groups of four rows, dimension by dimension."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        page = cache[slot // PAGE].view(KV_HEADS, 2, PAGE * DIM)
        row = slot % PAGE
        page[:, 0].view(KV_HEADS, PAGE // 4, DIM, 4)[:, row // 4, :, row % 4] = key
        page[:, 1].view(KV_HEADS, PAGE, DIM)[:, row] = value


def coarse_write(
    keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Quantised: numbers are rounded to multiples of 8."""
    plain_write((keys / 8).round() * 8, (values / 8).round() * 8, cache, slots)


class Impl:
    num_heads, scale = 6, 0.5

    def __init__(self, write: Write) -> None:
        self._write = write

    def do_kv_cache_update(
        self,
        layer: object,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        assert keys.is_contiguous() and values.is_contiguous() and isinstance(layer, Layer)
        self._write(keys, values, cache, slots)


class Layer:
    def __init__(self, write: Write) -> None:
        self.impl = Impl(write)


def make_caches(
    tokens_first: bool = False, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS
) -> dict[str, torch.Tensor]:
    """``[blocks, kv_heads, page, 2 * dim]`` of zeros, heads or tokens first in memory."""
    caches = {}
    for layer in range(LAYERS):
        shape = (
            (blocks, PAGE, KV_HEADS, 2 * DIM) if tokens_first else (blocks, KV_HEADS, PAGE, 2 * DIM)
        )
        cache = torch.zeros(shape, dtype=dtype)
        caches[f"layers.{layer}"] = cache.transpose(1, 2) if tokens_first else cache
    return caches


def make_pages(write: Write = plain_write, **caches: object) -> Pages:
    return Pages(make_caches(**caches), [Layer(write) for _ in range(LAYERS)])  # type: ignore[arg-type]


FORMS: dict[str, Callable[[], Pages]] = {
    "heads first": make_pages,
    "tokens first": lambda: make_pages(tokens_first=True),
    "packed": lambda: make_pages(packed_write),
}
