"""Forwards of our own over vLLM's model and pages, for rows that need not be neighbours.

In every layer vLLM writes the fresh rows of a forward and then attends, so each row sees the fresh
rows of its layer and the moved ones. Attention is our kernel's where there is one. Elsewhere it is
vLLM's: a run of neighbouring rows ``[a, b)`` is what it calls a prefill chunk, a request with
``b - a`` queries and ``b`` keys, and all runs of a request are one batch over the same page table.
This is the only code that touches vLLM's model runner.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.v1.attention.backend import CommonAttentionMetadata

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import Layer, Pages
from kvboost.model.execution.segment import Hook, Rules
from kvboost.reuse.paged.hooks import Attention, EnoughLayers

if TYPE_CHECKING:
    from kvboost.reuse.paged.graphs import Graphs
    from kvboost.reuse.paged.kernels import GpuKernels

logger = init_logger("vllm.kvboost")


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
    """``kernels`` attend if they are given; otherwise vLLM's backend does. With ``graphs``, small
    forwards are captured now and replayed."""

    def __init__(
        self,
        runner: Any,
        config: VllmConfig,
        pages: Pages,
        kernels: GpuKernels | None = None,
        *,
        graphs: bool = False,
    ) -> None:
        self._runner = runner
        self._config = config
        self._pages = pages
        self._kernels = kernels
        self._names = [
            name for groups in runner.attn_groups for g in groups for name in g.layer_names
        ]
        self._heads = pages.layers[0].impl.num_heads
        self.num_rows = 0
        """Rows computed so far."""
        self._graphs: Graphs | None = None
        if graphs and kernels is not None:
            self._graphs = self._capture(kernels)

    def __call__(
        self,
        token_ids: torch.Tensor,
        rows: torch.Tensor,
        table: torch.Tensor,
        hook: Hook | None = None,
        absent: torch.Tensor | None = None,
        until: int | None = None,
        *,
        stock: bool = False,
    ) -> None:
        """Runs the tokens at ``rows``, which increase, of the sequence whose pages are ``table``.
        ``token_ids`` and ``rows`` are int64 on the host. Rows that are ``absent``, ``[keys]``, are
        not attended to; only kernels can do that, and a captured probe takes them from its
        ``hook``. With ``until``, it ends in that layer after the hook has seen its queries.
        ``stock`` attends with vLLM's backend and replays no graphs."""
        self.num_rows += len(rows)
        if not stock and self._graphs is not None and self._graphs(token_ids, rows, table, hook):
            return
        device = self._pages.device
        ids = token_ids.to(device, torch.int32, non_blocking=True)
        positions = rows.to(device, non_blocking=True)
        slots = self._pages.slots(table, positions)
        if self._kernels is not None and not stock:
            attention = self._kernels.attention(rows, table, self._heads, absent)
            self._run(ids, positions, slots, hook, attention, until=until)
        else:
            assert absent is None, "vLLM's attention knows no absent rows"
            metadata = self._metadata(rows, positions, slots, table)
            self._run(ids, positions, slots, hook, None, metadata, until)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        hook: Hook | None,
        attention: Attention | None,
        metadata: dict[str, Any] | None = None,
        until: int | None = None,
    ) -> None:
        """One forward of vLLM's model; ``metadata`` is for its own attention. The compiled model
        has no guards: dtypes must be those of vLLM's own buffers, int32 and int64."""
        with (
            torch.inference_mode(),
            self._hooked(hook, attention, until),
            set_forward_context(
                metadata or dict.fromkeys(self._names),
                self._config,
                num_tokens=len(ids),
                slot_mapping=dict.fromkeys(self._names, slots),
            ),
            suppress(EnoughLayers),
        ):
            self._runner.model(input_ids=ids, positions=positions)

    def _capture(self, kernels: GpuKernels) -> Graphs | None:
        """Graphs of small forwards; None where vLLM captures none either, and where nobody has
        tried it."""
        from kvboost.reuse.paged.graphs import Graphs

        config = self._config
        if (
            config.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
            or config.lora_config is not None
            or config.parallel_config.tensor_parallel_size > 1
        ):
            return None
        # One page more than a prompt has: the scratch page of a probe.
        capacity = config.model_config.max_model_len + 2 * self._pages.size
        started = time.perf_counter()
        try:
            graphs = Graphs(self._run, kernels, self._heads, capacity)
        except RuntimeError as error:  # of memory, or of what cannot be captured
            logger.warning("KVBoost runs without CUDA graphs of its own: %s", error)
            return None
        seconds = time.perf_counter() - started
        logger.info("KVBoost captured its CUDA graphs in %.1f s", seconds)
        return graphs

    def _metadata(
        self, rows: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, table: torch.Tensor
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
        self, hook: Hook | None, attention: Attention | None, until: int | None
    ) -> Iterator[None]:
        """``hook`` sees every layer, and ``attention`` serves it. Compiled models are split at
        attention, so this is plain Python there too."""
        layers = self._pages.layers
        for number, layer in enumerate(layers):
            _observe(layer, number, hook, attention, is_last=number == until)
        try:
            yield
        finally:
            for layer in layers:
                del layer.impl.do_kv_cache_update, layer.impl.forward


def rules_of(layer: Layer) -> Rules:
    """How a layer of vLLM attends."""
    impl = layer.impl
    softcap = getattr(impl, "logits_soft_cap", None) or None  # some backends have 0 for none
    return Rules(impl.scale, layer.sliding_window, softcap, getattr(impl, "sinks", None))


def _observe(
    layer: Layer,
    number: int,
    hook: Hook | None,
    attention: Attention | None,
    *,
    is_last: bool = False,
) -> None:
    impl, rules = layer.impl, rules_of(layer)
    update, forward = impl.do_kv_cache_update, impl.forward

    def observed_update(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        if hook is not None:
            hook.on_fresh(number, key, value)
        update(layer, key, value, cache, slots)

    def observed_forward(
        layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, **more: Any
    ) -> Any:
        if hook is not None:
            hook.on_query(number, query, rules)
        if is_last:
            raise EnoughLayers
        if attention is None:
            return forward(layer, query, key, value, cache, metadata, **more)
        out = more["output"]
        attention(number, query, rules, out.view(query.shape))
        return out

    impl.do_kv_cache_update, impl.forward = observed_update, observed_forward


def _runs(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where runs of neighbouring ``rows`` begin and end."""
    breaks = (rows[1:] != rows[:-1] + 1).nonzero()[:, 0] + 1
    edge = breaks.new_tensor([0])
    return torch.cat([edge, breaks]), torch.cat([breaks, edge + len(rows)])
