"""Our Triton kernels over vLLM's pages on GPUs. What they do in one launch, ``worker.py`` and
``paged.py`` do with torch elsewhere; tests compare the two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN
from kvboost.integrations.vllm.hooks import Attention, EnoughLayers
from kvboost.integrations.vllm.pages import Pages
from kvboost.model.triton import attention, mass, move, shift
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.rows import PagedRows
from kvboost.model.triton.warm import warm_up
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.rope import CosSin, Rotation
from kvboost.reuse.shift import Spans, shift_weights


class GpuKernels:
    def __init__(self, pages: Pages, rotation: Rotation) -> None:
        self.pages = pages
        self._layers = PagedLayers(pages.caches)
        self.rotation = rotation
        self._table: CosSin | None = None

    def warm_up(self, heads: int) -> None:
        """Compiles the kernels, so that no request waits for it."""
        pairs = self.rotation.cos_sin(0, torch.zeros(1))[0].shape[1]
        warm_up(self._layers, heads, pairs, interleaved=self.rotation.interleaved)

    def place(self, hits: Sequence[Hit], chunks: Sequence[KVChunk], table: torch.Tensor) -> None:
        """Writes the rows of hits into pages, their keys rotated, in all layers at once."""
        device = table.device
        spans = [
            move.StoredSpan(
                chunk.data.tensors[PLAIN].to(device, non_blocking=True),
                hit.offset,
                hit.num_tokens,
                hit.start,
            )
            for hit, chunk in zip(hits, chunks, strict=True)
        ]
        distances = torch.tensor([hit.distance for hit in hits])
        cos, sin = (part[None].to(device) for part in self.rotation.cos_sin(0, distances))
        rows = move.MovedRows.of(spans, table, self._layers)
        move.move(rows, self._layers, (cos, sin), interleaved=self.rotation.interleaved)

    def attention(self, rows: torch.Tensor, table: torch.Tensor, heads: int) -> Attention:
        return self.attend_rows(self.rows(rows, table, heads))

    def attend_rows(self, rows: PagedRows) -> Attention:
        def attend(layer: int, query: torch.Tensor, scale: float, out: torch.Tensor) -> None:
            attention.attend(query, self.pages.caches[layer], rows, scale, out=out)

        return attend

    def probe(self, seen: AttentionMass, rows: torch.Tensor, table: torch.Tensor) -> MassHook:
        return MassHook(self, seen, rows, table)

    def shift(self, part: torch.Tensor, spans: Spans, table: torch.Tensor) -> ShiftHook | None:
        """A hook that shifts the moved rows of ``spans``; None if there is nothing to shift.
        Both are on the host."""
        if (weights := shift_weights(part, spans)) is None:
            return None
        plan = shift.ShiftPlan.of(part, spans.span_of, weights, table, self.pages.size)
        return ShiftHook(self, plan)

    def rows(self, rows: torch.Tensor, table: torch.Tensor, heads: int) -> PagedRows:
        return PagedRows.of(
            [rows],
            table[None],
            page=self.pages.size,
            heads=heads,
            kv_heads=self.pages.num_kv_heads,
            dtype=self.pages.dtype,
        )

    def rotations(self, end: int) -> CosSin:
        """Cosine and sine of every position before ``end``."""
        if self._table is None or len(self._table[0]) < end:
            positions = torch.arange(2 * end)
            cos, sin = self.rotation.cos_sin(0, positions)
            self._table = cos.to(self.pages.device), sin.to(self.pages.device)
        return self._table


class MassHook:
    """Gives ``seen`` the attention of the last rows of a forward, which are at ``rows``."""

    def __init__(
        self, kernels: GpuKernels, seen: AttentionMass, rows: torch.Tensor, table: torch.Tensor
    ) -> None:
        self.seen, self.num_rows = seen, len(rows)
        self._kernels, self._rows, self._table = kernels, rows, table
        self._mass = torch.zeros(len(seen.mass), device=table.device)
        self._tiled: PagedRows | None = None

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None: ...

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None:
        if layer not in self.seen.layers:
            return
        if self._tiled is None:
            self._tiled = self._kernels.rows(self._rows, self._table, query.shape[1])
            absent = torch.nn.functional.pad(self.seen.absent, (0, self.num_rows))
            self._absent = absent.to(query.device, non_blocking=True)
        self._mass += mass.attention_mass(
            query[-self.num_rows :],
            self._kernels.pages.caches[layer],
            self._tiled,
            scale,
            len(self._mass),
            absent=self._absent,
        )
        if layer == self.seen.layers[-1]:
            self.give(self._mass)
            raise EnoughLayers

    def give(self, mass: torch.Tensor) -> None:
        """Hands over what was seen. The host goes on meanwhile."""
        if mass.device.type != "cuda":
            self.seen.mass = mass.clone()
            return
        self.seen.mass = torch.empty(len(mass), pin_memory=True)
        self.seen.mass.copy_(mass, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        self.seen.wait = copied.synchronize


class ShiftHook:
    def __init__(self, kernels: GpuKernels, plan: shift.ShiftPlan) -> None:
        self.plan = plan
        self._kernels = kernels
        self._rotations = kernels.rotations(plan.end)

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer:  # the keys and values of layer 0 depend on the token alone
            shift.shift(
                keys,
                values,
                self._kernels.pages.caches[layer],
                self.plan,
                self._rotations,
                interleaved=self._kernels.rotation.interleaved,
            )

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None: ...
