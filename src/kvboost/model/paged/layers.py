"""Decoder layers of the Llama kind in ten kernels instead of thirty-five, for rows in pages: those
of decode steps, and those of prompts. Of layers with experts, everything before the experts.

Their products are those of the model, of which some are merged: queries, keys and values are one,
gate and up are one. The weights of merged layers become views of one tensor, so that they take no
more memory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from kvboost.model.adapters.layers import adapted_rows
from kvboost.model.execution.attention import Batch
from kvboost.model.execution.partial_attention import has_flash
from kvboost.model.execution.segment import Rules, Segment
from kvboost.model.native.decoder import compare_forward, replace_forward, restore_forward
from kvboost.model.paged.adapter_slots import AdapterSlots, Place, Product
from kvboost.model.paged.batch import PagedBatch, RowBatch
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import Slab
from kvboost.model.paged.step_batch import RunModel, StepBatch
from kvboost.model.triton.adapters import Addition, expand
from kvboost.model.triton.fused import add_norm, gate, rotate_and_write

log = logging.getLogger("kvboost")

ROUNDING = {torch.float32: 1e-3}
"""The largest distance of our layer from the model's for the same rows (:func:`_distance`);
elsewhere 2**-3."""
PROBED_ROWS, PROBED_LONG = 20, 640
"""Rows of a prompt that show whether our layers do what the model's do: more where long runs of
rows have kernels of their own."""
DENSE = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
"""Norm, attention, norm, gated layer; rotary positions in halves; perhaps norms of queries and
keys."""
SPARSE = ("GptOssDecoderLayer", "MixtralDecoderLayer", "Qwen3MoeDecoderLayer")
"""The same with experts, perhaps in some layers only; perhaps with windows and sinks."""


class Merged:
    """Linear layers that read the same rows, as one product."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.weight = torch.cat([each.weight.detach() for each in linears])
        biases = [each.bias.detach() for each in linears if each.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        sizes = [each.out_features for each in linears]
        for each, weight in zip(linears, self.weight.split(sizes), strict=True):
            each.weight.data = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self.weight, self.bias)

    def separate(self) -> None:
        """Gives each layer memory of its own again."""
        for each in self.linears:
            each.weight.data = each.weight.data.clone()


class FusedLayer:
    """One decoder layer for rows in pages."""

    def __init__(self, layer: Any, name: str) -> None:
        """``name``: the path of the layer in the model."""
        attention, mlp = layer.self_attn, layer.mlp
        self._layer = layer
        self._linears = linears_of(layer)
        sinks = getattr(attention, "sinks", None)
        self._rules = Rules(attention.scaling, _window_of(attention), None, sinks)
        qkv = Merged([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up = None if _is_sparse(layer) else Merged([mlp.gate_proj, mlp.up_proj])
        self.qkv, self.gate_up = qkv, gate_up
        self._norms, self._norm_eps = None, 0.0
        if hasattr(attention, "q_norm"):
            self._norms = attention.q_norm.weight, attention.k_norm.weight
            self._norm_eps = attention.q_norm.variance_epsilon

        groups = [("q", "k", "v"), ("o",)]
        groups += [] if gate_up is None else [("gate", "up"), ("down",)]
        self.places = [_place(layer, name, group) for group in groups]

    def serves(self, batch: Batch, rows: int) -> bool:
        """Whether a batch is one for layers of ours, no rows have adapters outside of slots, and
        the layer still has the linear layers that were merged: an adapter replaces them."""
        if not batch.is_fused or adapted_rows() is not None:
            return False
        return linears_of(self._layer) == self._linears

    def __call__(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: RowBatch
    ) -> torch.Tensor:
        summed, normed = self.attended(hidden, cos, sin, batch)
        mlp = self._layer.mlp
        if self.gate_up is None:
            mixed = mlp(normed[None])
            return summed[None] + (mixed[0] if isinstance(mixed, tuple) else mixed)
        gated = gate(*self._product(2, normed, batch, self.gate_up))
        # Adds the product in place: no kernel for the sum.
        down = mlp.down_proj.weight.t()
        out, change = self._product(3, gated, batch, lambda rows: summed.addmm_(rows, down))
        if change is not None:
            expand(change, out)
        return out[None]

    def attended(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: RowBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden`` with what attention adds to it, and the norm of that, ``[rows, width]``."""
        hidden, cos_sin = hidden[0], (cos[0], sin[0])
        layer = self._layer
        attention, number = layer.self_attn, layer.self_attn.layer_idx
        before, after = layer.input_layernorm, layer.post_attention_layernorm
        normed, _ = add_norm(hidden, before.weight, before.variance_epsilon)
        pages = batch.pages(number)
        qkv, change = self._product(0, normed, batch, self.qkv)
        query, keys, values = rotate_and_write(
            qkv, cos_sin, pages, batch.slots, self._norms, self._norm_eps, change
        )
        attended = batch.attend_rows(number, query, self._rules, fresh=(keys, values))
        out, change = self._product(1, attended.flatten(1), batch, attention.o_proj)
        normed, summed = add_norm(out, after.weight, after.variance_epsilon, hidden, change)
        return summed, normed

    def _product(
        self, place: int, rows: torch.Tensor, batch: RowBatch, product: Product
    ) -> tuple[torch.Tensor, Addition | None]:
        """``product(rows)``, and what adapters add to it."""
        if batch.adapters is None:
            return product(rows), None
        return self.places[place].start(rows, batch.adapters, product)


def _place(layer: Any, name: str, group: Sequence[str]) -> Place:
    """The linear layers of one product, for adapters."""
    part = "self_attn" if hasattr(layer.self_attn, f"{group[0]}_proj") else "mlp"
    linears = [getattr(getattr(layer, part), f"{each}_proj") for each in group]
    return Place(
        [f"{name}.{part}.{each}_proj" for each in group],
        linears[0].in_features,
        [each.out_features for each in linears],
    )


def linears_of(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    dense = () if _is_sparse(layer) else (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, *dense]


def _is_sparse(layer: Any) -> bool:
    return hasattr(layer.mlp, "experts")


def _window_of(attention: Any) -> int | None:
    window: int | None = getattr(attention.config, "sliding_window", None)
    return getattr(attention, "sliding_window", window)


class FusedLayers:
    """The decoder layers of a model that run rows in pages with fewer kernels."""

    def __init__(self, model: nn.Module, slab: Slab, run_model: RunModel) -> None:
        """Replaces them if each gives what the model's own gives; ``note`` says why not."""
        paths = {module: name for name, module in model.named_modules()}
        self._layers = {
            layer: FusedLayer(layer, paths[layer]) for layer in _decoders(model, slab.shape.dtype)
        }
        self.note: str | None = None
        if not self._layers:
            self.note = "no decoder layers of a kind that has faster ones"
            return
        distances: list[torch.Tensor] = []
        for layer, ours in self._layers.items():
            if ours.gate_up is not None:
                compare_forward(layer, ours, _distance, distances)
            else:
                _compare_attended(layer, ours, distances)
        try:
            with torch.inference_mode():
                _probe(slab, run_model)
                far = float(torch.stack(distances).max())
        except Exception as error:
            self._give_up(f"failed ({type(error).__name__}: {error})")
            return
        if not far < ROUNDING.get(slab.shape.dtype, 2**-3):
            self._give_up(f"were off by {far:.3f}")
            return
        for layer, ours in self._layers.items():
            vars(layer).pop("forward")
            replace_forward(layer, ours)

    def __len__(self) -> int:
        return len(self._layers)

    def adapter_slots(self) -> AdapterSlots | None:
        """Where steps find the weights of adapters; None if the model's own layers run."""
        places = [place for ours in self._layers.values() for place in ours.places]
        return AdapterSlots(places) if places else None

    def _give_up(self, reason: str) -> None:
        self.restore()
        self.note = f"our decoder layers {reason}; the model's own are left alone"
        log.warning(self.note)

    def restore(self) -> None:
        """Leaves the model as it was."""
        for layer, ours in self._layers.items():
            restore_forward(layer)
            for merged in filter(None, (ours.qkv, ours.gate_up)):
                merged.separate()
        self._layers = {}


def _probe(slab: Slab, run_model: RunModel) -> None:
    """Runs a decode step of two rows, in the page for padding, and some rows of a prompt."""
    batch = StepBatch(slab, 2)
    device = slab.shape.device
    positions = torch.tensor([3, 5], device=device)
    batch.positions.copy_(positions)
    batch.slots.copy_(positions)
    run_model(positions - 2, positions, batch)
    is_long = has_flash(device, slab.shape.dtype, slab.shape.head_dim)
    positions = torch.arange(PROBED_LONG if is_long else PROBED_ROWS, device=device)
    holding = slab.take(len(positions))
    if holding is None:
        return
    try:
        ids = positions % 199
        prompt = Segment(PagedKV(slab, holding), ids, range(len(ids)))
        run_model(ids, positions, PagedBatch([prompt]))
    finally:
        slab.release(holding)


def _distance(given: torch.Tensor, expected: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The largest error of a number, relative to the number and to what the layer has added to its
    row."""
    given, expected, before = given.float(), expected.float(), before.float()
    added = (expected - before).square().mean(dim=-1, keepdim=True).sqrt()
    return ((given - expected).abs() / (expected.abs() + added)).max()


def _compare_attended(layer: Any, ours: FusedLayer, distances: list[torch.Tensor]) -> None:
    """As ``compare_forward``, up to the experts. They are the model's own, and where two are nearly
    equal, rounding decides which one a row is sent through."""
    stock = layer.forward

    def forward(
        hidden_states: torch.Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        seen: list[torch.Tensor] = []
        norm = layer.post_attention_layernorm
        watch = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        try:
            out = stock(hidden_states, *args, past_key_values=past_key_values, **kwargs)
        finally:
            watch.remove()
        cos, sin = kwargs["position_embeddings"]
        summed, _ = ours.attended(hidden_states, cos, sin, past_key_values.batch)
        distances.append(_distance(summed[None], seen[0], hidden_states))
        return out

    layer.forward = forward


def _decoders(model: nn.Module, dtype: torch.dtype) -> Iterator[Any]:
    """The decoder layers of the kinds we know, except those without experts that have a window, and
    those with weights that are not plain."""
    for module in model.modules():
        if type(module).__name__ not in (*DENSE, *SPARSE):
            continue
        layer: Any = module
        config = layer.self_attn.config
        linears = linears_of(layer)
        plain = all(type(each) is nn.Linear and each.weight.dtype == dtype for each in linears)
        if (
            "forward" not in vars(layer)
            and (type(module).__name__ in SPARSE or _window_of(layer.self_attn) is None)
            and config.hidden_act == "silu"
            and layer.self_attn.head_dim % 2 == 0
            and plain
            and _are_biases_alike(linears)
        ):
            yield layer


def _are_biases_alike(linears: Sequence[nn.Linear]) -> bool:
    """Whether the linear layers that become one all have a bias, or none has."""
    biases = [[each.bias is None for each in group] for group in (linears[:3], linears[4:6])]
    return all(len(set(group)) <= 1 for group in biases) and all(
        each.bias is None for each in linears[6:]
    )
