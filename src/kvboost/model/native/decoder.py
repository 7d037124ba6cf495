"""Whole decoder layers of the Llama kind in one call: a step of a batch is then mostly arithmetic.
Where a hook looks at the rows on their way, it is two."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvboost.model.native.build import load_library
from kvboost.model.native.layers import Product, rounded_up

if TYPE_CHECKING:
    from kvboost.model.attention import Batch

KINDS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")
"""Norm, attention, norm, gated layer; rotary positions in halves; no norm of queries or keys."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm")),
        *((name, c_float) for name in ("input_eps", "post_eps", "scale")),
        *((name, c_int32) for name in ("index", "heads")),
    ]


class DecoderLayer:
    """What one layer does, on products that are there already."""

    def __init__(self, layer: Any, qkv: Product, o: Product, gate_up: Product, down: Product):
        attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
        dim = attention.head_dim
        weights = [norm.weight.detach() for norm in norms]  # held, whatever becomes of the layer
        self._held = (qkv, o, gate_up, down, weights)
        self._depth = max(product.depth for product in (qkv, o, gate_up, down))
        self._heads = o.depth // dim
        self._room = gate_up.depth + max(qkv.width + o.depth, gate_up.width)
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
        library = load_library()
        assert not isinstance(library, str), library
        self._library = library

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """``hidden`` is ``[1, rows, width]``, ``cos`` and ``sin`` ``[1, rows, head_dim]``. Writes
        fresh keys and values into each request's KV."""
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        rows, dim = hidden.shape[1], cos.shape[2]
        out = torch.empty_like(hidden)
        assert batch.kernels is not None
        room = batch.kernels.keep("room", rows * self._room)
        packed = batch.kernels.keep("packed", rounded_up(rows) * self._depth)
        num_parts = batch.plan.num_slots * self._heads * (dim + 1)
        parts = batch.kernels.keep("parts", num_parts, torch.float32)
        layer, plan, threads = self._address, batch.plan.address, torch.get_num_threads()
        given = [one.data_ptr() for one in (hidden, cos, sin)]
        places = [one.data_ptr() for one in (out, room, packed, parts)] + [batch.kernels.rooms()]
        if not batch.is_looked_at:
            self._library.kvboost_layer(layer, plan, *given, *places, threads)
            return out
        self._library.kvboost_layer_begin(layer, plan, *given, *places[1:3], threads)
        start = rows * self._width
        fresh = room[start : start + rows * self._qkv].view(1, rows, -1, dim).transpose(1, 2)
        kv_heads = (fresh.shape[1] - self._heads) // 2
        query, keys, values = fresh.split((self._heads, kv_heads, kv_heads), dim=1)
        batch.write(self._layer.index, keys, values)
        batch.show(self._layer.index, query, self._layer.scale)
        self._library.kvboost_layer_end(layer, plan, given[0], *places, threads)
        return out


def serve_layer(module: nn.Module, native: DecoderLayer) -> None:
    """Has ``native`` take the rows of our batches; others find the layer as it was."""
    stock = module.forward

    def forward(
        hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        batch: Batch | None = getattr(past_key_values, "batch", None)
        if batch is None or batch.kernels is None:
            return stock(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        cos, sin = kwargs["position_embeddings"]
        return native(hidden_states, cos, sin, batch)

    module.forward = forward


def give_back(module: nn.Module) -> None:
    """Undoes :func:`serve_layer`."""
    vars(module).pop("forward", None)
