"""Forwards of our own over vLLM's model and pages, for rows that need not be neighbours.

In every layer vLLM writes the fresh rows of a forward and then attends, so each row sees the fresh
rows of its layer and the moved ones. Attention is our kernel's where there is one. Elsewhere it is
vLLM's: a run of neighbouring rows ``[a, b)`` is what it calls a prefill chunk, a request with
``b - a`` queries and ``b`` keys, and all runs of a request are one batch over the same page table.
This is the only code that touches vLLM's model runner.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import Pages


class LayerHook(Protocol):
    """Sees our forward in every layer."""

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before fresh rows, ``[rows, kv_heads, dim]``, are written."""

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Before ``query``, ``[rows, heads, dim]``, attends; the fresh rows are in their pages."""


class Attention(Protocol):
    """Attends for the rows of one forward in place of vLLM's backend."""

    def __call__(
        self, layer: int, query: torch.Tensor, scale: float, out: torch.Tensor
    ) -> None: ...


class Kernels(Protocol):
    """Makes attention for scattered rows."""

    def attention(self, rows: torch.Tensor, table: torch.Tensor, heads: int) -> Attention: ...


def find_runner() -> Any:
    """The model runner that is registering its caches: it is up the stack. vLLM gives connectors
    no other way to reach the model."""
    frame = inspect.currentframe()
    while frame is not None:
        runner = frame.f_locals.get("self")
        if hasattr(runner, "attn_groups") and hasattr(runner, "model"):
            return runner
        frame = frame.f_back
    raise UnsupportedModelError("this version of vLLM has no model runner that KVBoost knows")


class SparseForward:
    """``kernels`` attend if they are given; otherwise vLLM's backend does."""

    def __init__(
        self, runner: Any, config: VllmConfig, pages: Pages, kernels: Kernels | None = None
    ) -> None:
        self._runner = runner
        self._config = config
        self._pages = pages
        self._kernels = kernels
        self._names = [
            name for groups in runner.attn_groups for g in groups for name in g.layer_names
        ]
        self._find_graphs()
        self.num_rows = 0
        """Rows computed so far."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        hook: LayerHook | None = None,
        *,
        stock: bool = False,
    ) -> None:
        """Runs the tokens at ``rows``, which increase, of the sequence whose pages are ``table``.
        ``token_ids`` and ``rows`` are int64 on the host. ``stock`` attends with vLLM's backend and
        replays no graphs."""
        device, count = self._pages.device, len(rows)
        ids = token_ids.to(device, torch.int32, non_blocking=True)
        positions = rows.to(device, non_blocking=True)
        slots = self._pages.slots(table, positions)
        attention = None
        metadata: dict[str, Any] = dict.fromkeys(self._names)
        if self._kernels is not None and not stock:
            heads = self._pages.layers[0].impl.num_heads
            attention = self._kernels.attention(rows, table, heads)
        else:
            metadata = self._metadata(rows, positions, slots, table)
        with (
            torch.inference_mode(),
            self._hooked(hook, attention, count),
            self._in_buffers(ids, positions, attention is not None) as (ids, positions, graphs),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=len(ids),
                slot_mapping=dict.fromkeys(metadata, slots),
                **graphs,
            ),
        ):
            # The compiled model has no guards: these dtypes must be those of vLLM's own buffers.
            self._runner.model(input_ids=ids, positions=positions)
        self.num_rows += count

    @contextmanager
    def _in_buffers(
        self, ids: torch.Tensor, positions: torch.Tensor, wanted: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
        """The inputs in the buffers that vLLM captured its graphs with, padded, and how to replay
        them; as they are if there is no graph for them. vLLM may have prepared its next forward in
        these buffers, so they are restored."""
        count, size = len(ids), self._graph_size(len(ids)) if wanted else None
        if size is None:
            yield ids, positions, {}
            return
        buffers = [buffer[:size] for buffer in self._buffers]
        saved = [buffer.clone() for buffer in buffers]
        for buffer, given in zip(buffers, (ids, positions), strict=True):
            buffer[:count].copy_(given)
            buffer[count:].zero_()
        try:
            yield (
                *buffers,
                {
                    "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE,
                    "batch_descriptor": BatchDescriptor(num_tokens=size),
                },
            )
        finally:
            for buffer, before in zip(buffers, saved, strict=True):
                buffer.copy_(before)

    def _graph_size(self, count: int) -> int | None:
        """The size of the smallest captured graph for ``count`` rows. Graphs of pieces leave
        attention to Python."""
        return next((size for size in self._graph_sizes if size >= count), None)

    def _find_graphs(self) -> None:
        """The buffers that vLLM captured its graphs with, and their sizes: its model runner keeps
        them in one of two ways."""
        runner = self._runner
        self._graph_sizes: list[int] = []
        if self._config.lora_config is not None:
            return
        if (dispatcher := getattr(runner, "cudagraph_dispatcher", None)) is not None:
            captured = dict(dispatcher.get_capture_descs())
            self._buffers = (runner.input_ids.gpu, runner.positions)
        elif (manager := getattr(runner, "cudagraph_manager", None)) is not None:
            captured = {} if manager.use_breakable_cg else manager._capture_descs
            self._buffers = (runner.input_buffers.input_ids, runner.input_buffers.positions)
        else:
            return
        pieces = captured.get(CUDAGraphMode.PIECEWISE, ())
        self._graph_sizes = sorted({one.num_tokens for one in pieces})

    def _metadata(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        table: torch.Tensor,
    ) -> dict[str, Any]:
        """Every run of neighbouring rows as a request of its own, as vLLM's backend wants it."""
        device = self._pages.device
        starts, ends = _runs(rows)
        lengths = rows[ends - 1].to(torch.int32) + 1
        query_starts = torch.cat([starts, ends[-1:]]).to(torch.int32)
        common = CommonAttentionMetadata(
            query_start_loc=query_starts.to(device, non_blocking=True),
            query_start_loc_cpu=query_starts,
            seq_lens=lengths.to(device, non_blocking=True),
            num_reqs=len(starts),
            num_actual_tokens=len(rows),
            max_query_len=int((ends - starts).max()),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table.to(torch.int32).repeat(len(starts), 1),
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(starts), dtype=torch.bool, device=device),
            seq_lens_cpu_upper_bound=lengths,
        )
        metadata: dict[str, Any] = {}
        for groups in self._runner.attn_groups:
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata.update(dict.fromkeys(group.layer_names, built))
        return metadata

    @contextmanager
    def _hooked(
        self, hook: LayerHook | None, attention: Attention | None, count: int
    ) -> Iterator[None]:
        """``hook`` sees every layer, and ``attention`` serves it. Compiled models are split at
        attention, so this is plain Python there too."""
        impls = [layer.impl for layer in self._pages.layers]
        for number, impl in enumerate(impls):
            _observe(impl, number, hook, attention, count)
        try:
            yield
        finally:
            for impl in impls:
                del impl.do_kv_cache_update, impl.forward


def _observe(
    impl: Any, number: int, hook: LayerHook | None, attention: Attention | None, count: int
) -> None:
    update, forward, scale = impl.do_kv_cache_update, impl.forward, impl.scale

    def observed_update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if hook is not None:
            hook.on_fresh(number, key[:count], value[:count])
        update(layer, key, value, cache, slots)

    def observed_forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, **more: Any
    ) -> Any:
        rows = query[:count]
        if hook is not None:
            hook.on_query(number, rows, scale)
        if attention is None:
            return forward(layer, query, key, value, cache, metadata, **more)
        out = more["output"]
        attention(number, rows, scale, out[:count].view(rows.shape))
        return out

    impl.do_kv_cache_update, impl.forward = observed_update, observed_forward


def _runs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of neighbouring ``rows`` begin and end."""
    breaks = (rows[1:] != rows[:-1] + 1).nonzero()[:, 0] + 1
    edge = breaks.new_tensor([0])
    return torch.cat([edge, breaks]), torch.cat([breaks, edge + len(rows)])
