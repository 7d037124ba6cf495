"""A request's KV in pages: the same contract as :class:`RequestKV`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kvboost.errors import KVTooLargeError
from kvboost.model.execution.kv import Prefix, RequestKV
from kvboost.model.paged.slab import PAGE, Holding, Slab, pages_for


class SharedPages(Prefix):
    """The first rows of a request: whole pages. ``keeps`` is what keeps them until a request holds
    them."""

    def __init__(self, pages: Sequence[int], keeps: object = None) -> None:
        super().__init__(len(pages) * PAGE)
        self.pages = pages
        self._keeps = keeps


class PagedKV(RequestKV):
    """Row ``p`` is in page ``p // PAGE`` of the request. ``base`` are pages that other requests
    hold too; they are never written. Reading gathers rows into a copy."""

    runs_ahead = True

    def __init__(self, slab: Slab, holding: Holding, base: Prefix | None = None) -> None:
        self.shape = slab.shape
        self.slab: Slab = slab
        self.holding = holding
        self.start = 0
        self._shared = base
        self._borrowed = self.own_start

    @property
    def base(self) -> Prefix | None:  # type: ignore[override]
        return self._shared

    @property
    def capacity(self) -> int:
        return len(self.holding.pages) * PAGE

    @property
    def positions_on(self) -> torch.device:
        return torch.device("cpu")

    @property
    def own_start(self) -> int:
        return 0 if self._shared is None else self._shared.count

    def attach_prefix(self, base: Prefix | None) -> None:
        raise RuntimeError("pages are shared when they are lent")

    def share(self, count: int) -> SharedPages:  # type: ignore[override]
        """The pages of at most the first ``count`` rows. They must not change from now on."""
        shared = SharedPages(self.holding.pages[: count // PAGE])
        if shared.count > self.own_start:
            self._shared = shared
        return shared

    def prepare_repair(self) -> None:
        """Does nothing: kernels find rows in any pages."""

    def detach_prefix(self) -> None:
        if self._shared is not None:
            if not self.slab.replace(self.holding, pages_for(self._shared.count)):
                self._refuse(self.capacity)
            self._shared, self._borrowed = None, 0

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.capacity and not self.slab.extend(self.holding, num_tokens):
            self._refuse(num_tokens)

    def _refuse(self, num_tokens: int) -> None:
        most = self.slab.num_pages * self.slab.page_bytes
        raise KVTooLargeError(num_tokens, num_tokens * self.shape.row_bytes, most)

    def rows(self, start: int, end: int) -> torch.Tensor:
        return self._gather(self.slab.data, start, end)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        sides = self._gather(self.slab.layers[layer][None], start, end)
        return sides[0], sides[-1]

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        rows = self.shape.allocate(end - start)
        yield rows
        self._scatter(self.slab.data, torch.arange(start, end, device=rows.device), rows)

    @contextmanager
    def changing(
        self, layer: int, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self.layer(layer, start, end)
        yield keys, values
        self.write(layer, range(start, end), keys, values)

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        if isinstance(positions, range):
            positions = torch.arange(positions.start, positions.stop, device=self.shape.device)
        rows = torch.stack([keys, values][: self.shape.sides])
        self._scatter(self.slab.layers[layer][None], positions, rows)

    def memory(self) -> dict[int, int]:
        return {id(self.slab): self.slab.used_bytes}

    @property
    def spared_bytes(self) -> int:
        return self._borrowed * self.shape.row_bytes

    def _gather(self, layers: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` of ``[layers, pages, ...]``, as ``[sides, layers, kv_heads, rows,
        dim]``."""
        first, last = start // PAGE, max(pages_for(end), start // PAGE)
        pages = self.slab.table[self.holding.row, first:last]
        found = layers.index_select(1, pages)
        sides, dim = self.shape.sides, self.shape.head_dim
        found = found.unflatten(-1, (sides, dim)).permute(4, 0, 2, 1, 3, 5)
        dense = found.reshape(sides, len(layers), self.shape.num_kv_heads, -1, dim)
        return dense.narrow(3, start - first * PAGE, end - start)

    def _scatter(self, layers: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes ``rows``, ``[sides, layers, kv_heads, rows, dim]``, over those at
        ``positions``."""
        pages = self.slab.table[self.holding.row].index_select(0, positions // PAGE).long()
        # An index between slices puts the indexed dimension first: [rows, layers, heads, width].
        layers[:, pages, :, positions % PAGE] = rows.permute(3, 1, 2, 0, 4).flatten(3)
