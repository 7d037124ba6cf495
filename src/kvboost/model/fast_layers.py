"""Layers that serve few rows faster than stock transformers does: its layers are made for many.

With a plain weight, oneDNN rearranges it on every call. For few rows (a decode step, the tail
after a hit, what is repaired of moved text) that costs as much as the product itself, so those
rows meet a copy that was rearranged once; with kernels of our own, gates and norms take one call
instead of many. Many rows, unless whole layers take them in one call (native/decoder.py), make the
very calls stock transformers makes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kvboost.model.native.decoder import KINDS, DecoderLayer
from kvboost.model.native.layers import Product, can_multiply, can_norm, rms_norm

Serve = Callable[[torch.Tensor], torch.Tensor]

FEW_ROWS = 384
MEMORY_SHARE = 0.25
"""The copies may take this share of the machine's memory; if they would take more, none is made."""
ROUNDING = 2**-6
"""How far a layer of ours may be from the one it stands in for, in bf16."""

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same rows one after the other: one larger product is faster than
several small ones."""


class PackedGroup:
    """The rearranged weights of linear layers that read the same rows, as one product. What the
    first of them asks for is kept until the last has it; one that brings other rows is computed
    anew. Rearranged weights have no ordinary strides, so they are neither moved nor saved with
    the model."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = torch.cat(biases) if biases else None
        self.product = Product(weight, bias) if can_multiply(weight) else _onednn(weight, bias)
        self._sizes = [linear.out_features for linear in linears]
        self._rows: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def output(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """What the layer at ``index`` gives."""
        if self._rows is not rows:
            out = self.product(rows)
            if len(self._sizes) == 1:
                return out
            self._rows, self._outputs = rows, out.split(self._sizes, -1)
        result = self._outputs[index]
        if index + 1 == len(self._sizes):
            self._rows, self._outputs = None, ()
        return result


class FrozenLinear(nn.Module):
    """An ``nn.Linear`` for inference, of whose weights there is a copy elsewhere. It is no linear
    layer any more, so that nobody puts an adapter on it that the copy would not know."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class PackedLinear(FrozenLinear):
    """The one at ``index`` of its ``group``."""

    def __init__(self, linear: nn.Linear, group: PackedGroup | None = None, index: int = 0) -> None:
        super().__init__(linear)
        self.group = group or PackedGroup([linear])
        self._index = index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if are_few(rows):
            return self.group.output(rows, self._index)
        return super().forward(rows)


def are_few(rows: torch.Tensor) -> bool:
    """Whether these go by packed weights, which are for bfloat16 on a CPU."""
    few = rows.numel() <= FEW_ROWS * rows.shape[-1]
    return few and rows.dtype == torch.bfloat16 and rows.device.type == "cpu"


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Serve:
    """The product with ``weight`` as oneDNN would have it."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda rows: product(rows, packed, bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing does anything on this machine."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_layers(model: nn.Module) -> int:
    """Replaces the linear layers of ``model``, and what gated layers and norms do with few rows;
    returns how many linear layers. A weight that is used elsewhere too (an output head tied to the
    embedding) stays as it is."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners[id(weight)] = owners.get(id(weight), 0) + 1
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and owners[id(child.weight)] == 1
    ]
    copies = sum(child.weight.nbytes for _, _, child in found)
    if copies > MEMORY_SHARE * memory_bytes():
        return 0
    allowed = {id(child) for _, _, child in found}
    gated = set()
    for module in model.modules():
        if _gates(module, allowed) and _serve_few(module, Gated(module)):
            gated |= {id(module.gate_proj), id(module.up_proj)}
            for name in ("gate_proj", "up_proj"):
                setattr(module, name, FrozenLinear(getattr(module, name)))
        elif _is_rms_norm(module):
            _serve_few(module, _norm(module))
    for parent, name, child in found:
        # Not those of a gate, nor one that an earlier one has taken along.
        if id(child) not in gated and type(getattr(parent, name)) is nn.Linear:
            _pack_in(parent, name, allowed, child)
    return len(found)


def _gates(module: Any, allowed: set[int]) -> bool:
    """Whether this is ``down_proj(silu(gate_proj(x)) * up_proj(x))``, by its parts."""
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names:
        return False
    from transformers.activations import SiLUActivation  # here: `doctor` does not need it

    gate, up = module.gate_proj, module.up_proj
    return (
        isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation)
        and {id(gate), id(up)} <= allowed
        and gate.weight.shape == up.weight.shape
        and (gate.bias is None) == (up.bias is None)
        and can_multiply(gate.weight)
    )


class Gated:
    """What a gated layer does."""

    def __init__(self, mlp: Any) -> None:
        gate, up = mlp.gate_proj, mlp.up_proj
        biases = () if gate.bias is None else (gate.bias.detach(), up.bias.detach())
        self.product = Product.gated(gate.weight.detach(), up.weight.detach(), biases)
        self._mlp = mlp

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self._mlp.down_proj(self.product(rows))
        return down


def _is_rms_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return (
        hasattr(module, "variance_epsilon")
        and isinstance(weight, torch.Tensor)
        and weight.ndim == 1
        and can_norm(weight)
    )


def _norm(norm: Any) -> Serve:
    return lambda rows: rms_norm(rows, norm.weight, norm.variance_epsilon)


def _serve_few(module: nn.Module, serve: Serve) -> bool:
    """Has ``serve`` take few rows, if it gives what the layer itself gives. Many find the layer
    as it was."""
    stock = module.forward
    width = next(weight.shape[-1] for weight in module.parameters())
    dtype = next(module.parameters()).dtype
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randn(4, width, generator=generator, device="cpu").to(dtype)
    if len(inspect.signature(stock).parameters) != 1:
        return False
    try:
        with torch.inference_mode():
            expected, given = stock(rows).float(), serve(rows).float()
    except Exception:  # it wants something else
        return False
    if not torch.allclose(
        given, expected, rtol=ROUNDING, atol=ROUNDING * float(expected.abs().max())
    ):
        return False

    module.forward = FewOrMany(serve, stock)
    return True


@dataclass(frozen=True)
class FewOrMany:
    """A layer's forward."""

    few: Serve
    many: Serve

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return self.few(rows) if are_few(rows) else self.many(rows)


def decoder_layers(model: nn.Module) -> dict[nn.Module, DecoderLayer]:
    """The decoder layers that can go through in one call, by products that are there."""
    found = {}
    for module in model.modules():
        if type(module).__name__ in KINDS and (products := _products_of(module)):
            found[module] = DecoderLayer(module, *products)
    return found


def _products_of(layer: Any) -> list[Product]:
    """Those of a layer in order, if it has them all."""
    attention, mlp = layer.self_attn, layer.mlp
    window = getattr(attention.config, "sliding_window", None)
    if getattr(attention, "sliding_window", window) is not None:  # Mistral's only asks the config
        return []
    gated = getattr(mlp.forward, "few", None)
    holders = [
        getattr(one, "group", None) for one in (attention.q_proj, attention.o_proj, mlp.down_proj)
    ]
    holders.insert(2, gated)
    products = [getattr(holder, "product", None) for holder in holders]
    if not all(isinstance(one, Product) for one in products):
        return []
    others = (getattr(one, "group", None) for one in (attention.k_proj, attention.v_proj))
    one_group = all(group is holders[0] for group in others)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    plain = all(isinstance(norm.forward, FewOrMany) for norm in norms)
    return products if one_group and plain else []  # type: ignore[return-value]


def _pack_in(parent: nn.Module, name: str, allowed: set[int], child: nn.Linear) -> None:
    """Replaces a layer of ``parent``, together with those that read the same rows."""
    names = next((group for group in TOGETHER if name in group), (name,))
    linears = [getattr(parent, one, None) for one in names]
    fitting = all(
        type(one) is nn.Linear
        and id(one) in allowed
        and one.in_features == child.in_features
        and (one.bias is None) == (child.bias is None)
        for one in linears
    )
    if not fitting:
        names, linears = (name,), [child]
    group = PackedGroup(linears)  # type: ignore[arg-type]
    for index, (one, linear) in enumerate(zip(names, linears, strict=True)):
        setattr(parent, one, PackedLinear(linear, group, index))  # type: ignore[arg-type]


def memory_bytes() -> int:
    """The memory of this machine; nothing, where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0
