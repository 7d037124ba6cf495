"""Whole layers with quantised weights in one call."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.model.native.adapters import ChangeTables
from kvboost.model.native.decoder import (
    MOST_NARROW_ROWS,
    DecoderLayer,
    replace_forward,
    restore_forward,
)
from kvboost.model.native.quantized_product import QuantizedProduct
from kvboost.model.quantized.weight import QuantizedWeight
from support.kernel_forms import SIZES, each_dtype

ROWS = MOST_NARROW_ROWS + 8
QKV, GATED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


def quantize(linear: nn.Linear, bits: int, group: int) -> QuantizedWeight:
    """Rounds the weight, and makes the layer's own what the codes stand for."""
    weight = linear.weight.detach().float()
    grouped = weight.reshape(len(weight), -1, group)
    if bits == 4:
        offsets = grouped.amin(-1).half()
        scales = ((grouped.amax(-1) - offsets.float()) / 15).half()
        codes = (grouped - offsets.float()[..., None]) / scales.float()[..., None]
        codes = codes.round().clamp(0, 15).to(torch.uint8).reshape(weight.shape)
        found = QuantizedWeight(codes[:, ::2] | codes[:, 1::2] << 4, scales, offsets, 4, group)
    else:
        scales = (grouped.abs().amax(-1) / 31).half()
        codes = (grouped / scales.float()[..., None]).round().clamp(-32, 31).to(torch.int8)
        found = QuantizedWeight(codes.reshape(weight.shape), scales, None, 8, group)
    linear.weight.data = found.dequantized().to(linear.weight.dtype)
    return found


def install(model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    """Makes all layers run on codes: values in 6 bits and the others in 4. Rows of the first and
    the last product have two codes."""
    tables = ChangeTables()
    for index, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        products = []
        for parent, names in (
            (attention, QKV),
            (attention, ("o_proj",)),
            (mlp, GATED),
            (mlp, ("down_proj",)),
        ):
            linears = [getattr(parent, name) for name in names]
            weights = [
                quantize(linear, *((8, 16) if name == "v_proj" else (4, 32)))
                for name, linear in zip(names, linears, strict=True)
            ]
            bias = torch.cat([linear.bias.detach() for linear in linears])
            gated, fine = names == GATED, names in (QKV, ("down_proj",))
            products.append(QuantizedProduct(weights, bias, gated=gated, fine=fine, dtype=dtype))
        ours = DecoderLayer(layer, *products, tables=tables, name=f"model.layers.{index}")
        assert ours.serves(SimpleNamespace(kernels=object()), 10_000)  # type: ignore[arg-type]
        replace_forward(layer, ours)


@each_dtype
def test_a_model_runs_on_codes(dtype: torch.dtype) -> None:
    """A prompt of more rows than layers of plain weights take, then a step: near the model with
    the numbers that the codes stand for, however the prompt is divided."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    model = LlamaForCausalLM(config).to(dtype).eval()
    forward = Forward(model, packed=True)
    install(model, dtype)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    given, divided = run(forward, 0, ROWS), run(forward, 0, 7, 150, ROWS)
    assert not calls
    for layer in model.model.layers:
        restore_forward(layer)
    expected = run(forward, 0, ROWS)
    assert calls
    for ours in (given, divided):
        assert (ours - expected).norm() < 0.05 * expected.norm()


def run(forward: Forward, *cuts: int) -> torch.Tensor:
    """The logits after a prompt that is read in slices, and after one more token."""
    ids = torch.arange(ROWS + 1) % 120
    kv = RequestKV(forward.shape, len(ids))
    logits = [
        forward([Segment(kv, ids[first:end], range(first, end))])
        for first, end in pairwise((*cuts, len(ids)))
    ]
    return torch.cat(logits[-2:]).float()
