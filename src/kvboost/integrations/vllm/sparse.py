"""Forwards of our own over vLLM's model and pages, for rows that need not be neighbours.

A run of neighbouring rows ``[a, b)`` is what vLLM calls a prefill chunk: a request with ``b - a``
queries and ``b`` keys. All runs of a request are one batch over the same page table. In every
layer vLLM writes the fresh rows of all runs and then attends, so each row sees the fresh rows of
its layer and the moved ones. This is the only code that touches vLLM's model runner.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import Pages


class LayerHook(Protocol):
    """Sees our forward in every layer."""

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before fresh rows, ``[rows, kv_heads, dim]``, are written."""

    def on_query(self, layer: int, query: torch.Tensor, scale: float) -> None:
        """Before ``query``, ``[rows, heads, dim]``, attends; the fresh rows are in their pages."""


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
    def __init__(self, runner: Any, config: VllmConfig, pages: Pages) -> None:
        self._runner = runner
        self._config = config
        self._pages = pages
        self.num_rows = 0
        """Rows computed so far."""

    def __call__(
        self,
        token_ids: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        hook: LayerHook | None = None,
    ) -> None:
        """Runs the tokens at ``rows``, which increase, of the sequence whose pages are ``table``.
        ``token_ids`` and ``rows`` are int64 on the host."""
        device = self._pages.device
        starts, ends = _runs(rows)
        lengths = rows[ends - 1].to(torch.int32) + 1
        query_starts = torch.cat([starts, ends[-1:]]).to(torch.int32)
        positions = rows.to(device, non_blocking=True)
        slots = self._pages.slots(table, positions)
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
        metadata = {}
        for groups in self._runner.attn_groups:
            for group in groups:
                built = group.get_metadata_builder().build(0, common)
                metadata.update(dict.fromkeys(group.layer_names, built))
        with (
            torch.inference_mode(),
            self._hooked(hook),
            set_forward_context(
                metadata,
                self._config,
                num_tokens=len(rows),
                slot_mapping=dict.fromkeys(metadata, slots),
            ),
        ):
            # The compiled model has no guards: these dtypes must be those of vLLM's own buffers.
            self._runner.model(
                input_ids=token_ids.to(device, torch.int32, non_blocking=True), positions=positions
            )
        self.num_rows += len(rows)

    @contextmanager
    def _hooked(self, hook: LayerHook | None) -> Iterator[None]:
        """``hook`` sees every layer. Compiled models are split at attention, so this is plain
        Python there too."""
        if hook is None:
            yield
            return
        impls = [layer.impl for layer in self._pages.layers]
        for number, impl in enumerate(impls):
            _observe(impl, number, hook)
        try:
            yield
        finally:
            for impl in impls:
                del impl.do_kv_cache_update, impl.forward


def _observe(impl: Any, number: int, hook: LayerHook) -> None:
    update, forward, scale = impl.do_kv_cache_update, impl.forward, impl.scale

    def observed_update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        hook.on_fresh(number, key[: len(slots)], value[: len(slots)])
        update(layer, key, value, cache, slots)

    def observed_forward(layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        hook.on_query(number, query, scale)
        return forward(layer, query, *args, **kwargs)

    impl.do_kv_cache_update, impl.forward = observed_update, observed_forward


def _runs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of neighbouring ``rows`` begin and end."""
    breaks = (rows[1:] != rows[:-1] + 1).nonzero()[:, 0] + 1
    edge = breaks.new_tensor([0])
    return torch.cat([edge, breaks]), torch.cat([breaks, edge + len(rows)])
