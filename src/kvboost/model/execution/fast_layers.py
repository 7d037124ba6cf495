"""Layers that run few rows faster than stock transformers does.

Few rows are a decode step, the tail after a hit, or the repaired rows of moved text. In bfloat16,
oneDNN rearranges a plain weight on every call, which costs as much as the product itself: few rows
are multiplied with a copy that was rearranged once. Our kernels also do a gate or a norm in one
call, and a whole decoder layer (native/decoder.py). In float32 only whole layers are replaced, and
they hold copies of half the size where the weights are bfloat16 numbers.

Many rows make the very calls that stock transformers makes, unless a whole layer takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kvboost.model import native
from kvboost.model.adapters.layers import adapted_rows
from kvboost.model.loading.machine import memory_bytes
from kvboost.model.native.adapters import ChangeTables
from kvboost.model.native.decoder import KINDS, DecoderLayer
from kvboost.model.native.layers import (
    BLOCK,
    Linear,
    Product,
    can_halve,
    can_multiply,
    can_norm,
    rms_norm,
)
from kvboost.model.native.quantized_product import QuantizedProduct
from kvboost.model.quantized.layers import QuantizedLinear
from kvboost.model.quantized.products import joint_product

Serve = Callable[[torch.Tensor], torch.Tensor]
Names = tuple[str, ...]

FEW_ROWS = 384
MEMORY_SHARE = 0.25
"""The copies may take this share of the machine's memory; if they would take more, none is made."""
ROUNDING = 2**-6
"""The largest distance of our layers' output from the original's, in bf16."""

QKV = ("q_proj", "k_proj", "v_proj")
GATED = ("gate_proj", "up_proj")
TOGETHER = (QKV, GATED)
"""Names of layers that read the same rows: one larger product is faster than several small ones."""


@dataclass
class FastLayers:
    """The packed copies of a model's weights, by module."""

    num_linears: int = 0
    products: dict[tuple[nn.Module, Names], Linear] = field(default_factory=dict)
    """Our products, by parent module and the names of the linear layers they replace."""
    norms: set[nn.Module] = field(default_factory=set)
    """Norms that equal ours."""

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are quantised, so that rows are rounded."""
        return any(isinstance(product, QuantizedProduct) for product in self.products.values())


class PackedGroup:
    """The rearranged weights of linear layers that read the same rows, as one product. The outputs
    for the first of them are kept until the last has asked; other rows are computed anew.
    Rearranged weights have no ordinary strides, so they are neither moved nor saved with the
    model."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        weight, bias = _joined(linears)
        self.product = Product(weight, bias) if can_multiply(weight) else _onednn(weight, bias)
        self._sizes = [linear.out_features for linear in linears]
        self._rows: torch.Tensor | None = None
        self._outputs: Sequence[torch.Tensor] = ()

    def output(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        """The output of the layer at ``index``."""
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
    """An ``nn.Linear`` for inference whose weights were copied elsewhere. It is not an
    ``nn.Linear`` any more, so that no adapter is put on it: the copy would not have it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class PackedLinear(FrozenLinear):
    """The layer at ``index`` of its ``group``."""

    def __init__(self, linear: nn.Linear, group: PackedGroup, index: int) -> None:
        super().__init__(linear)
        self.group, self._index = group, index

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if are_few(rows):
            return self.group.output(rows, self._index)
        return super().forward(rows)


def are_few(rows: torch.Tensor) -> bool:
    """Whether these rows are multiplied with packed weights: few rows in bfloat16."""
    return rows.numel() <= FEW_ROWS * rows.shape[-1] and rows.dtype == torch.bfloat16


def _onednn(weight: torch.Tensor, bias: torch.Tensor | None) -> Serve:
    """The product with ``weight``, rearranged once by oneDNN."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda rows: product(rows, packed, bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packing makes anything faster on this machine."""
    if device.type != "cpu":
        return False
    if dtype == torch.float32:
        return native.is_available(dtype)
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_layers(model: nn.Module) -> FastLayers:
    """Packs the linear layers of ``model``, and in bfloat16 replaces what gated layers and norms do
    with few rows. A weight that is used elsewhere too (an output head tied to the embedding) stays
    as it is. Quantised layers have packed their codes before."""
    if any(isinstance(module, QuantizedLinear) for module in model.modules()):
        return _quantized_layers(model)
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
    if sum(_copy_bytes(child.weight) for _, _, child in found) > MEMORY_SHARE * memory_bytes():
        return FastLayers()
    allowed = {id(child) for _, _, child in found}
    if any(child.weight.dtype == torch.float32 for _, _, child in found):
        return _pack_whole_layers(model, allowed)
    packed = FastLayers(num_linears=len(found))
    gated = set()
    for module in model.modules():
        if _is_gated(module, allowed):
            ours = Gated(module)
            if _install_if_equal(module, ours):
                packed.products[module, GATED] = ours.product
                gated |= {id(module.gate_proj), id(module.up_proj)}
                _freeze(module, GATED)
        elif _is_rms_norm(module) and _install_if_equal(module, _norm(module)):
            packed.norms.add(module)
    for parent, name, child in found:
        # Leaves out the layers of a gate, and those that an earlier one was packed with.
        if id(child) not in gated and type(getattr(parent, name)) is nn.Linear:
            _pack_in(parent, name, allowed, child, packed)
    return packed


def _copy_bytes(weight: torch.Tensor) -> int:
    """The memory that the packed copy takes, judged by its first rows."""
    return weight.nbytes // 2 if can_halve(weight[:BLOCK]) else weight.nbytes


def _pack_whole_layers(model: nn.Module, allowed: set[int]) -> FastLayers:
    """Makes the products of decoder layers that our kernels can run whole. The model's own layers
    stay as they are, except that no adapter can be added."""
    packed = FastLayers()
    for layer in _decoders(model):
        parts = _parts_of(layer)
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        fits = all(_fit_together(parent, names, allowed) for parent, names in parts)
        if not (fits and _is_gated(layer.mlp, allowed) and all(map(_is_rms_norm, norms))):
            continue
        for parent, names in parts:
            linears = [getattr(parent, name) for name in names]
            product = Gated(parent).product if names == GATED else Product(*_joined(linears))
            packed.products[parent, names] = product
            packed.num_linears += len(names)
            _freeze(parent, names)
        packed.norms.update(norms)
    return packed


def _quantized_layers(model: nn.Module) -> FastLayers:
    """The products of decoder layers whose weights are all quantised."""
    packed = FastLayers()
    for layer in _decoders(model):
        found = {part: joint_product(*part) for part in _parts_of(layer)}
        products = {part: product for part, product in found.items() if product is not None}
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        if len(products) == len(found) and is_silu(layer.mlp) and all(map(_is_rms_norm, norms)):
            packed.products.update(products)
            packed.norms.update(norms)
    return packed


def _parts_of(layer: Any) -> list[tuple[nn.Module, Names]]:
    """The products of a decoder layer, in order."""
    attention, mlp = layer.self_attn, layer.mlp
    return [(attention, QKV), (attention, ("o_proj",)), (mlp, GATED), (mlp, ("down_proj",))]


def _freeze(parent: nn.Module, names: Names) -> None:
    for name in names:
        setattr(parent, name, FrozenLinear(getattr(parent, name)))


def _joined(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weights and biases of layers that read the same rows."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return weight, torch.cat(biases) if biases else None


def _is_gated(module: Any, allowed: set[int]) -> bool:
    """Whether this is ``down_proj(silu(gate_proj(x)) * up_proj(x))``, by its parts."""
    names = {name for name, _ in module.named_children()}
    if not {"gate_proj", "up_proj", "down_proj"} <= names:
        return False
    gate, up = module.gate_proj, module.up_proj
    return (
        is_silu(module)
        and {id(gate), id(up)} <= allowed
        and gate.weight.shape == up.weight.shape
        and (gate.bias is None) == (up.bias is None)
        and can_multiply(gate.weight)
    )


def is_silu(mlp: Any) -> bool:
    """Whether the gates of a module pass through SiLU, torch's or transformers' own."""
    act = getattr(mlp, "act_fn", None)
    return isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation"


class Gated:
    """A gated layer on our product."""

    def __init__(self, mlp: Any) -> None:
        gate, up = mlp.gate_proj, mlp.up_proj
        biases = () if gate.bias is None else (gate.bias.detach(), up.bias.detach())
        self.product = Product.gated(gate.weight.detach(), up.weight.detach(), biases)
        self._mlp = mlp

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if adapted_rows() is not None:  # adapters change what is computed within the product
            return type(self._mlp).forward(self._mlp, rows)
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


def _install_if_equal(module: nn.Module, serve: Serve) -> bool:
    """Makes ``serve`` run few rows if its output equals the layer's own. Many rows reach the layer
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
    except Exception:  # it takes other arguments
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


def decoder_layers(model: nn.Module, packed: FastLayers) -> dict[nn.Module, DecoderLayer]:
    """The decoder layers that our kernels can run whole, on products that were packed."""
    found = {}
    names = {module: name for name, module in model.named_modules()}
    tables = ChangeTables()
    for layer in _decoders(model):
        products = [packed.products.get(part) for part in _parts_of(layer)]
        norms = {layer.input_layernorm, layer.post_attention_layernorm}
        if None not in products and norms <= packed.norms:
            found[layer] = DecoderLayer(
                layer,
                *products,  # type: ignore[arg-type]
                tables=tables,
                name=names[layer],
            )
    return found


def _decoders(model: nn.Module) -> Iterator[Any]:
    """The decoder layers of the kinds we know, except those with a window."""
    for module in model.modules():
        if type(module).__name__ in KINDS:
            layer: Any = module
            window = getattr(layer.self_attn.config, "sliding_window", None)
            if getattr(layer.self_attn, "sliding_window", window) is None:  # or in its config
                yield layer


def _fit_together(parent: nn.Module, names: Names, allowed: set[int]) -> bool:
    """Whether these linear layers can be one product of our kernels."""
    linears = [getattr(parent, name, None) for name in names]
    return _are_alike(linears, allowed) and all(
        isinstance(linear, nn.Linear) and can_multiply(linear.weight) for linear in linears
    )


def _are_alike(linears: Sequence[Any], allowed: set[int]) -> bool:
    """Whether these are linear layers of the same kind that may be packed."""
    return all(
        type(linear) is nn.Linear
        and id(linear) in allowed
        and linear.in_features == linears[0].in_features
        and (linear.bias is None) == (linears[0].bias is None)
        for linear in linears
    )


def _pack_in(
    parent: nn.Module, name: str, allowed: set[int], child: nn.Linear, packed: FastLayers
) -> None:
    """Replaces a layer of ``parent``, together with those that read the same rows."""
    names: Names = next((group for group in TOGETHER if name in group), (name,))
    linears = [getattr(parent, other, None) for other in names]
    if not _are_alike(linears, allowed):
        names, linears = (name,), [child]
    group = PackedGroup(linears)  # type: ignore[arg-type]
    if isinstance(group.product, Product):
        packed.products[parent, names] = group.product
    for index, (other, linear) in enumerate(zip(names, linears, strict=True)):
        setattr(parent, other, PackedLinear(linear, group, index))  # type: ignore[arg-type]
