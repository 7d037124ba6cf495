"""The rows of a request in vLLM's pages, as the hooks of a repair see them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvboost.integrations.vllm.pages import Pages
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Hook, Rules


class PageRows:
    """Rows ``[0, num_rows)`` of the request whose pages are ``table``. Reading a layer gathers its
    rows into a copy."""

    def __init__(self, pages: Pages, table: torch.Tensor, num_rows: int) -> None:
        self._pages = pages
        self._slots = pages.slots(table, torch.arange(num_rows, device=pages.device))
        self.shape = KVShape(
            len(pages.caches), pages.num_kv_heads, pages.head_dim, pages.dtype, pages.device
        )

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values in rows ``[start, end)``: ``[1, kv_heads, rows, dim]`` each."""
        keys, values = self._pages.read(layer, self._slots[start:end])
        return keys.transpose(0, 1)[None].contiguous(), values.transpose(0, 1)[None].contiguous()

    @contextmanager
    def changing(
        self, layer: int, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        keys, values = self.layer(layer, start, end)
        yield keys, values
        changed = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        self._pages.write(layer, *changed, self._slots[start:end])


class OfLastRows(Hook):
    """Shows ``probe`` the queries of the last ``num_rows`` rows of a forward: the others run for
    the keys and values that these attend to."""

    def __init__(self, probe: Hook, num_rows: int) -> None:
        self._probe, self._num_rows = probe, num_rows

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        self._probe.on_query(layer, query[-self._num_rows :], rules)
