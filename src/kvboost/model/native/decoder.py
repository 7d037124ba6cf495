"""Whole decoder layers of the Llama kind in one call. A step of a batch is then mostly arithmetic,
not Python. With a hook, a layer is two calls, and the hook runs between them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_void_p
from typing import Any, Protocol

import torch
from torch import nn

from kvboost.model import native
from kvboost.model.adapters.layers import adapted_rows
from kvboost.model.execution.attention import Batch
from kvboost.model.execution.segment import Rules
from kvboost.model.native.adapters import ChangeTables, changes_of
from kvboost.model.native.layers import Linear, Product, rounded_up

Distance = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""A measure of how far a layer's output is from the expected one, given the rows before it."""

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Norm, attention, norm, gated layer; rotary positions in halves; no norm of queries or keys."""
MOST_ROWS = 96
"""The most rows that our layers take at once in float32: as many as they multiply faster than torch
does. In bfloat16, and with quantised weights, they take any number."""
NARROW, MOST_NARROW_ROWS = 576, 512
"""Layers of at most this width take more rows. torch multiplies them about a tenth faster, but its
operations between the products cost more than that. Measured at this width; wider layers were not.
Longer texts, which are read in slices of 1,024 rows, go through torch's products."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm")),
        *((name, c_float) for name in ("input_eps", "post_eps", "scale")),
        *((name, c_int32) for name in ("index", "heads")),
    ]


class DecoderLayer:
    """One layer on products that were made before."""

    def __init__(
        self,
        layer: Any,
        qkv: Linear,
        o: Linear,
        gate_up: Linear,
        down: Linear,
        *,
        tables: ChangeTables,
        name: str,
    ) -> None:
        """``name`` is the layer's path in its model, ``tables`` is where adapters are looked
        up."""
        attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
        dim = attention.head_dim
        weights = [norm.weight.detach() for norm in norms]  # the kernels read them
        self._held = (qkv, o, gate_up, down, weights)
        self._packed = max(product.packed_depth for product in (qkv, o, gate_up, down))
        self._heads = o.depth // dim
        num_queries = self._heads * dim
        num_keys = (qkv.width - num_queries) // 2
        self._tables = tables
        tables.add_layer(attention.layer_idx, name, num_queries, num_keys)
        self._scratch = gate_up.depth + max(qkv.width + o.depth, gate_up.width)
        self._layer = _Layer(
            *(product.address for product in (qkv, o, gate_up, down)),
            *(weight.data_ptr() for weight in weights),
            *(norm.variance_epsilon for norm in norms),
            attention.scaling,
            attention.layer_idx,
            self._heads,
        )
        self._address = ctypes.addressof(self._layer)
        self._qkv, self._width = qkv.width, qkv.depth
        self._library = native.library(qkv.dtype)
        self._most_rows: int | None = None
        if isinstance(qkv, Product) and qkv.dtype == torch.float32:
            self._most_rows = MOST_NARROW_ROWS if qkv.depth <= NARROW else MOST_ROWS

    def serves(self, batch: Batch, rows: int) -> bool:
        """Whether our kernels run the batch, faster than the model's own for so many rows."""
        is_fast = self._most_rows is None or rows <= self._most_rows
        return is_fast and batch.kernels is not None

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Writes fresh keys and values into each request's KV."""
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        rows, dim = hidden.shape[1], cos.shape[2]
        out = torch.empty_like(hidden)
        assert batch.kernels is not None
        scratch = batch.kernels.scratch("layer", rows * self._scratch)
        packed = batch.kernels.scratch("packed", rounded_up(rows) * self._packed)
        num_parts = batch.plan.num_slots * self._heads * (dim + 1)
        parts = batch.kernels.scratch("parts", num_parts, torch.float32)
        layer, plan, threads = self._address, batch.plan.address, torch.get_num_threads()
        given = [tensor.data_ptr() for tensor in (hidden, cos, sin)]
        places = [tensor.data_ptr() for tensor in (out, scratch, packed, parts)]
        changes = changes_of(adapted_rows(), self._tables, batch.kernels)
        changed = None if changes is None else changes.address
        places.append(batch.kernels.workspaces())
        if not batch.has_hooks:
            self._library.kvboost_layer(layer, plan, *given, *places, changed, threads)
            return out
        self._library.kvboost_layer_begin(layer, plan, *given, *places[1:3], changed, threads)
        start = rows * self._width
        fresh = scratch[start : start + rows * self._qkv].view(1, rows, -1, dim).transpose(1, 2)
        kv_heads = (fresh.shape[1] - self._heads) // 2
        query, keys, values = fresh.split((self._heads, kv_heads, kv_heads), dim=1)
        batch.write(self._layer.index, keys, values)
        batch.show(self._layer.index, query, Rules(self._layer.scale))
        self._library.kvboost_layer_end(layer, plan, given[0], *places, changed, threads)
        return out


class OurLayer(Protocol):
    """A decoder layer of ours."""

    def serves(self, batch: Any, rows: int) -> bool:
        """Whether it runs so many rows of a batch."""

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """``hidden`` is ``[1, rows, width]``, ``cos`` and ``sin`` ``[1, rows, head_dim]``."""


def replace_forward(module: nn.Module, ours: OurLayer) -> None:
    """Makes ``ours`` run the rows of our batches; other calls reach the layer as it was."""
    stock = module.forward

    def forward(
        hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        batch: Batch | None = getattr(past_key_values, "batch", None)
        if batch is None or not ours.serves(batch, hidden_states.shape[1]):
            return stock(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        batch.pause()
        cos, sin = kwargs["position_embeddings"]
        return ours(hidden_states, cos, sin, batch)

    module.forward = forward


def compare_forward(
    module: nn.Module, ours: OurLayer, distance: Distance, distances: list[torch.Tensor]
) -> None:
    """Makes the layer itself run our batches, and ours after it on the same rows; adds how far the
    outputs are apart. The rows of the next layer are the model's own: in 16 bits, errors of all
    layers together would say little about one."""
    stock = module.forward

    def forward(
        hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        out = stock(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        given = ours(hidden_states, cos, sin, past_key_values.batch)
        expected = out[0] if isinstance(out, tuple) else out
        distances.append(distance(given, expected, hidden_states))
        return out

    module.forward = forward


def restore_forward(module: nn.Module) -> None:
    """Undoes :func:`replace_forward` and :func:`compare_forward`."""
    vars(module).pop("forward", None)
