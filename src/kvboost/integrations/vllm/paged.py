"""KVBoost's repair over vLLM's pages: its hooks see a layer of pages as dense rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvboost.integrations.vllm.pages import Pages
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Hook, Rules
from kvboost.reuse.paged.hooks import EnoughLayers
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.shift import Shift


class GatheredRows:
    """Rows ``[0, len(slots))`` of a request. One layer at a time is gathered and, if it was
    changed, written back."""

    def __init__(self, pages: Pages, slots: torch.Tensor) -> None:
        self._pages = pages
        self._slots = slots
        self.capacity = len(slots)
        self.shape = KVShape(
            len(pages.caches), pages.num_kv_heads, pages.head_dim, pages.dtype, pages.device
        )

    def gather(self, layer: int) -> None:
        keys, values = self._pages.read(layer, self._slots)
        self._keys = keys.transpose(0, 1)[None].contiguous()
        self._values = values.transpose(0, 1)[None].contiguous()

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the gathered layer: ``[1, kv_heads, rows, dim]`` each."""
        return self._keys[:, :, start:end], self._values[:, :, start:end]

    @contextmanager
    def changing(
        self, layer: int, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """As :meth:`layer`; ``write_back`` writes what was changed."""
        yield self.layer(layer, start, end)

    def write_back(self, layer: int, rows: range) -> None:
        keys, values = (
            part[0].transpose(0, 1) for part in self.layer(layer, rows.start, rows.stop)
        )
        self._pages.write(layer, keys, values, self._slots[rows.start : rows.stop])


class GatheredMass(Hook):
    """Gives ``mass`` the attention of the last ``num_rows`` rows of a forward."""

    def __init__(self, mass: AttentionMass, kv: GatheredRows, num_rows: int) -> None:
        self._mass, self._kv, self._num_rows = mass, kv, num_rows
        mass.kv = kv  # type: ignore[assignment]

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        if self._mass.bands.number(layer) is None:
            return
        self._kv.gather(layer)
        self._mass.on_query(layer, query[-self._num_rows :], rules)
        if layer == self._mass.bands.last:
            raise EnoughLayers


class GatheredShift(Hook):
    """Applies ``shift`` to the rows that the forward does not compute."""

    def __init__(self, shift: Shift, kv: GatheredRows) -> None:
        self._shift, self._kv = shift, kv
        shift.kv = kv  # type: ignore[assignment]

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer == 0:
            return
        self._kv.gather(layer)
        self._shift.on_fresh(layer, keys, values)
        self._kv.write_back(layer, self._shift.touched)
