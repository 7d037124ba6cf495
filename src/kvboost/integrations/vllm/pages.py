"""vLLM's pages: reading and writing rows of KV, whatever their layout.

Rows are written with the attention backend's own kernel. Where they land inside a page is found by
writing numbered rows into a scratch page, so no packing needs to be known. A cache that does not
store plain numbers (fp8 and the like) shows no permutation and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from kvboost.errors import UnsupportedModelError

_BASE = 128  # exact in bfloat16


class Layer(Protocol):
    """An attention layer of vLLM."""

    impl: Any
    sliding_window: int | None
    """How many of the last keys a row sees, its own among them."""


class Pages:
    """The KV cache of all layers: each ``[blocks, kv_heads, page, 2 * head_dim]`` as far as shapes
    go. A *slot* numbers a row: page times page size plus the row in it. ``groups`` has the layers
    of each group, whose pages are in one table; one has all of them if none are given."""

    def __init__(
        self,
        caches: Mapping[str, torch.Tensor],
        layers: Sequence[Layer],
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self.caches = list(caches.values())
        self.layers = list(layers)
        self.groups = [list(group) for group in groups] or [list(range(len(self.caches)))]
        first = self.caches[0]
        if any(cache.shape[1:] != first.shape[1:] for cache in self.caches) or first.dim() != 4:
            shapes = sorted({tuple(cache.shape) for cache in self.caches})
            raise UnsupportedModelError(f"its layers have KV caches of different shapes: {shapes}")
        self.num_blocks, self.num_kv_heads, self.size, both = first.shape
        self.head_dim = both // 2
        self.device, self.dtype = first.device, first.dtype
        self.on_gpu = first.device.type == "cuda"
        if self.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise _not_plain(self.dtype)  # its kernel may not even take plain numbers
        # Taken now: our forwards put hooks in their place for a while.
        self._writers = [layer.impl.do_kv_cache_update for layer in layers]
        index = self._find_layout()
        natural = torch.arange(len(index)).view(self.num_kv_heads, self.size, 2, self.head_dim)
        self.is_plain = bool((index == natural.permute(2, 1, 0, 3).flatten()).all())
        if not self.is_plain and not all(cache.is_contiguous() for cache in self.caches):
            raise UnsupportedModelError("its pages are packed and not contiguous")
        in_page = index.view(2, self.size, self.num_kv_heads, self.head_dim).permute(1, 2, 0, 3)
        self._index = in_page.contiguous().to(self.device)

    @property
    def row_bytes(self) -> int:
        """The size of one row over all layers."""
        numbers = 2 * len(self.caches) * self.num_kv_heads * self.head_dim
        return numbers * self.dtype.itemsize

    def slots(self, pages: Sequence[int] | torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The slots of a sequence's ``rows``, whose pages are ``pages``, in order."""
        table = torch.as_tensor(pages, device=self.device)
        return table[rows // self.size] * self.size + rows % self.size

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at ``slots``: ``[rows, kv_heads, head_dim]`` each."""
        keys, values = self._read(self.caches[layer], *self._places(slots)).unbind(2)
        return keys, values

    def _places(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The page of each slot, and the row in it."""
        return slots // self.size, slots % self.size

    def _read(self, cache: torch.Tensor, page: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """``[rows, kv_heads, 2, head_dim]``."""
        if self.is_plain:
            return cache[page, :, row].view(len(row), self.num_kv_heads, 2, self.head_dim)
        return cache.flatten(1)[page[:, None, None, None], self._index[row]]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Writes ``[rows, kv_heads, head_dim]`` to ``slots``."""
        self._writers[layer](
            self.layers[layer], keys.contiguous(), values.contiguous(), self.caches[layer], slots
        )

    def read_all(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of all layers, ``[2, layers, kv_heads, rows, head_dim]``, as chunks hold them.
        In memory they are in another order: on a GPU, one launch for each layer is enough."""
        places = self._places(slots)
        rows = torch.stack([self._read(cache, *places) for cache in self.caches])
        return rows.permute(3, 0, 2, 1, 4)

    def copy(self, tables: Sequence[torch.Tensor]) -> torch.Tensor:
        """The pages of each group's table, which are of one length, as they are in memory:
        ``[layers, pages, ...]``."""
        first = self.caches[0]
        length = max(map(len, tables))
        copied = first.new_empty(len(self.caches), length, *first.shape[1:])
        for group, table in zip(self.groups, tables, strict=True):
            for layer in group:
                torch.index_select(self.caches[layer], 0, table, out=copied[layer])
        return copied

    def rows_of(self, copied: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` of what :meth:`copy` gave, counted from its first page, as
        :meth:`read_all` gives them."""
        first = start // self.size
        some = copied[:, first : -(-end // self.size)]
        layers, pages = some.shape[:2]
        if self.is_plain:
            rows = some.view(layers, pages, self.num_kv_heads, self.size, 2, self.head_dim)
            rows = rows.permute(4, 0, 2, 1, 3, 5)
        else:
            rows = some.flatten(2)[:, :, self._index].permute(4, 0, 3, 1, 2, 5)
        shape = 2, layers, self.num_kv_heads, pages * self.size, self.head_dim
        return rows.reshape(shape)[:, :, :, start - first * self.size : end - first * self.size]

    def write_all(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes rows as :meth:`read_all` gives them."""
        self.write_layers(range(len(self.caches)), rows, slots)

    def write_layers(self, layers: Sequence[int], rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes only those of ``layers``; ``rows`` are of all."""
        for layer in layers:
            keys, values = rows[:, layer].transpose(1, 2)
            self.write(layer, keys, values, slots)

    def _find_layout(self) -> torch.Tensor:
        """For each number of a page's keys and values, ``[2, rows, kv_heads, head_dim]`` flattened,
        its place in the page's memory."""
        cache = self.caches[0]
        shape = (2, self.size, self.num_kv_heads, self.head_dim)
        size = 2 * self.size * self.num_kv_heads * self.head_dim
        numbers = torch.arange(1, size + 1, device=self.device).view(shape)
        slots = torch.arange(self.size, 2 * self.size, device=self.device)
        places = torch.zeros(size, dtype=torch.int64, device=self.device)
        digit = 1
        while digit <= size:
            page = torch.zeros_like(cache[:2])
            keys, values = (numbers // digit % _BASE).to(self.dtype)
            self._writers[0](self.layers[0], keys, values, page, slots)
            places += page[1].flatten().to(torch.int64) * digit
            digit *= _BASE
        places = places.cpu() - 1
        if sorted(places.tolist()) != list(range(size)):
            raise _not_plain(self.dtype)
        index = torch.empty(size, dtype=torch.int64)
        index[places] = torch.arange(size)
        return index


def check_sizes(page: int, pages: Pages) -> None:
    """Raises ``UnsupportedModelError`` unless the attention's kernel has pages of ``page`` rows, as
    vLLM has: it may have split vLLM's."""
    caches = [one for layer in pages.layers for one in tensors_of(layer) if one.dim() == 4]
    rows = pages.num_blocks * pages.size
    sizes = {pages.size, *(rows // len(one) for one in caches)}
    if sizes != {page}:
        listed = ", ".join(map(str, sorted(sizes - {page})))
        raise UnsupportedModelError(
            f"vLLM has pages of {page} tokens and its attention's kernel pages of {listed}; try "
            "another kernel, such as --attention-backend FLASH_ATTN"
        )


def tensors_of(layer: object) -> list[torch.Tensor]:
    """The tensors in which vLLM has the states of ``layer``, or its rows."""
    return _flat(getattr(layer, "kv_cache", ()))


def _flat(given: object) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    return [one for some in given for one in _flat(some)] if isinstance(given, list | tuple) else []


def _not_plain(dtype: torch.dtype) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"its KV cache ({dtype}) does not hold keys and values as plain numbers"
    )
