"""A transformers model that is made without weights and filled from a quantised checkpoint, tensor
by tensor: with its codes, so that it never exists in ordinary numbers, or with what they mean."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from kvboost.errors import ModelError
from kvboost.model.execution.traits import traits_of
from kvboost.model.loading.machine import release_freed_memory
from kvboost.model.native.quantized_product import WEIGHTS_AT_ONCE
from kvboost.model.quantized.checkpoint import QuantizedCheckpoint
from kvboost.model.quantized.cuda import TensorCoreProduct
from kvboost.model.quantized.experts import PRODUCTS, pack_experts
from kvboost.model.quantized.layers import QuantizedEmbedding, QuantizedLinear
from kvboost.model.quantized.mxfp4 import Mxfp4Weight
from kvboost.model.quantized.products import make_layers
from kvboost.model.streaming.parking import Parking

TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that read the same rows: they become one product where a kernel can do that."""
FINE = frozenset(("q_proj", "k_proj", "v_proj", "qkv_proj"))
"""Names of layers that keep more of their rows, as the output head does: of all layers, rounding
theirs changes a model the most for what it saves."""
Part = TypeVar("Part")


def build(
    make_model: Callable[[], PreTrainedModel],
    checkpoint: QuantizedCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
    *,
    packed: bool,
    parked: Parking | None = None,
) -> PreTrainedModel:
    """The model that ``make_model`` makes, with the weights of ``checkpoint``, on ``device``; or
    ``parked`` on the host in the form that it has there. Linear layers and embeddings stay
    ``packed``, or all parameters become ordinary numbers."""
    from accelerate import init_empty_weights  # not in every environment that has vLLM

    with init_empty_weights(include_buffers=False), no_init_weights():
        model = make_model()
    place = device if parked is None else torch.device("cpu")
    if packed:
        _fill_quantized(model, checkpoint, device, dtype, place, parked)
        _fill_experts(model, checkpoint, device, parked)
    _fill_plain(model, checkpoint, place, dtype)
    release_freed_memory()
    return model.eval().to(place)


def _fill_quantized(
    model: PreTrainedModel,
    checkpoint: QuantizedCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
    place: torch.device,
    parked: Parking | None,
) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    sources = {
        module: f"{name}.weight" for module, name in names.items() if isinstance(module, nn.Linear)
    }
    if head is not None and model.config.get_text_config().tie_word_embeddings:
        sources[head] = f"{names[embedding]}.weight"

    def fill(part: tuple[nn.Module, tuple[str, ...]]) -> None:
        parent, children = part
        weights = [checkpoint.quantized(sources[getattr(parent, child)]) for child in children]
        prefix = f"{names[parent]}." if names[parent] else ""
        biases = [
            checkpoint.plain(f"{prefix}{child}.bias")
            if getattr(parent, child).bias is not None
            else None
            for child in children
        ]
        fine = getattr(parent, children[0]) is head or not FINE.isdisjoint(children)
        layers = make_layers(weights, biases, device, dtype, fine=fine)
        if parked is not None:
            _park(layers, parked)
        for child, layer in zip(children, layers, strict=True):
            setattr(parent, child, layer)

    quantized = {module for module, name in sources.items() if checkpoint.is_quantized(name)}
    parts = sorted(_parts(model, quantized), key=_size, reverse=True)
    _in_threads(fill, parts)
    source = f"{names[embedding]}.weight"
    if checkpoint.is_quantized(source):
        model.set_input_embeddings(_embedding(embedding, checkpoint, source, device, dtype, place))


def _fill_experts(
    model: PreTrainedModel,
    checkpoint: QuantizedCheckpoint,
    device: torch.device,
    parked: Parking | None,
) -> None:
    """Puts codes in the place of experts' weights that the checkpoint has in MXFP4."""
    for name, module in list(model.named_modules()):
        if not all(module._parameters.get(child) is not None for child in PRODUCTS):
            continue
        found = {}
        for child in PRODUCTS:
            weight = checkpoint.mxfp4(f"{name}.{child}", device)
            if weight is None:
                break
            experts, width, depth = weight.shape
            _check_shape(f"{name}.{child}", (experts, depth, width), getattr(module, child))
            found[child] = weight if parked is None else _parked(weight, parked)
        else:
            pack_experts(module, found)


def _parked(weight: Mxfp4Weight, parking: Parking) -> Mxfp4Weight:
    held = nn.Module()
    held.register_buffer("codes", weight.codes)
    held.register_buffer("scales", weight.scales)
    parking.park(held)
    return replace(weight, codes=held.get_buffer("codes"), scales=held.get_buffer("scales"))


def _check_shape(name: str, found: Sequence[int], expected: torch.Tensor) -> None:
    if tuple(found) != tuple(expected.shape):
        raise ModelError(
            f"the tensor for {name!r} has the shape {tuple(found)}, and the model's config says "
            f"{tuple(expected.shape)}; the file is for another model"
        )


def _in_threads(fill: Callable[[Part], None], parts: Iterable[Part]) -> None:
    """Fills several parts at a time. What is raised for one of them, is raised here."""
    with ThreadPoolExecutor(max(1, min(WEIGHTS_AT_ONCE, torch.get_num_threads()))) as threads:
        for _ in threads.map(fill, parts):
            pass


def _park(layers: Sequence[QuantizedLinear], parking: Parking) -> None:
    """Moves what was made for a device that has no memory to spare."""
    for layer in layers:
        if isinstance(layer.product, TensorCoreProduct):
            layer.product = layer.product.with_less_memory()
        parking.park(layer)


def _size(part: tuple[Any, tuple[str, ...]]) -> int:
    """The largest parts come first, while there is the most memory for what is in between."""
    parent, children = part
    return sum(getattr(parent, child).weight.numel() for child in children)


def _parts(
    model: nn.Module, quantized: Collection[nn.Module]
) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """The quantised linear layers of each module, those that read the same rows together."""
    for parent in model.modules():
        left = [name for name, child in parent.named_children() if child in quantized]
        for group in TOGETHER:
            if set(group) <= set(left):
                yield parent, group
                left = [name for name in left if name not in group]
        yield from ((parent, (name,)) for name in left)


def _embedding(
    embedding: Any,
    checkpoint: QuantizedCheckpoint,
    source: str,
    device: torch.device,
    dtype: torch.dtype,
    place: torch.device,
) -> QuantizedEmbedding:
    """On a CPU, rows are read from the checkpoint when they are asked for; elsewhere the codes are
    copied to their place."""
    if traits_of(device).is_host:
        rows, identity = checkpoint.rows(source), checkpoint.digest(source)
    else:
        weight = checkpoint.quantized(source).to(place)
        rows, identity = weight.rows, weight.digest()
    scale = getattr(embedding, "embed_scale", None)  # Gemma multiplies by it
    return QuantizedEmbedding(
        embedding.num_embeddings,
        embedding.embedding_dim,
        rows,
        dtype=dtype,
        scale=None if scale is None else float(scale),
        digest=identity,
    )


def _fill_plain(
    model: PreTrainedModel,
    checkpoint: QuantizedCheckpoint,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    def fill(part: tuple[str, nn.Parameter]) -> None:
        name, parameter = part
        value = checkpoint.plain(name, device, dtype)
        _check_shape(name, value.shape, parameter)
        parent, _, attribute = name.rpartition(".")
        filled = nn.Parameter(value, requires_grad=False)
        setattr(model.get_submodule(parent), attribute, filled)

    ties = isinstance(model.get_output_embeddings(), nn.Linear)
    if ties:  # else a shared weight has a name for each of its places
        model.tie_weights()
    by_size = sorted(model.named_parameters(), key=lambda part: part[1].numel(), reverse=True)
    _in_threads(fill, by_size)
    if ties:
        model.tie_weights()
