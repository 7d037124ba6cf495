"""A model on a device that need not hold all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost.config import format_bytes
from kvboost.errors import ModelError
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.streaming.disk import DiskLayers
from kvboost.model.streaming.embedding import HostEmbedding, host_embedding
from kvboost.model.streaming.layers import StreamedLayers, slot_of
from kvboost.model.streaming.parking import host_bytes, layers_file
from kvboost.model.streaming.plan import NUM_SLOTS, DeviceBudget, LayerPlan, ModelSizes, make_plan
from kvboost.model.streaming.slabs import SlabLayout, layer_bytes
from kvboost.model.streaming.slots import CudaSlots, Slots
from kvboost.model.streaming.tensors import move_tensors, tensors_of

NUM_STAGED = 2
"""Layers that are read from disk ahead of their use."""

MakeSlots = Callable[[int, int, torch.device], Slots]
"""Given their number and size, and the device."""


@dataclass(frozen=True)
class Placement:
    """Where a model's layers are, and what is left for requests."""

    plan: LayerPlan
    streamed: StreamedLayers | None
    """None if all layers are on the device."""
    host_weights: int = 0
    """Numbers of the embedding, if that stays on the host; it is no parameter of the model then."""

    @property
    def note(self) -> str | None:
        """Why steps take longer than on a device that holds the model; None if they do not."""
        if self.streamed is None:
            return None
        plan = self.plan
        number = len(plan.resident) + len(plan.streamed)
        disk = f", {len(plan.on_disk)} of them from disk" if plan.on_disk else ""
        return (
            f"{len(plan.streamed)} of {number} layers are streamed{disk}: a step sends "
            f"{format_bytes(self.streamed.pass_bytes)} to the GPU, without CUDA graphs and fused "
            "layers"
        )

    @property
    def key(self) -> str:
        """Tells placements apart in which a forward takes another time."""
        plan = self.plan
        return f"{len(plan.in_memory)} layers streamed, {len(plan.on_disk)} from disk"


def place(
    model: PreTrainedModel,
    device: torch.device,
    budget: DeviceBudget,
    make_slots: MakeSlots = CudaSlots,
    *,
    spilled_bytes: int = 0,
) -> Placement:
    """Moves a model from the host to ``device``, and leaves the layers on the host that do not fit
    into the budget. Layers that are streamed need their memory on the host once: each slab takes
    the place of a layer's own tensors, of which ``spilled_bytes`` are in a file."""
    torch.cuda.empty_cache()  # what it took to make the model
    layers = decoder_layers(model)
    sizes = measure(model, layers)
    in_memory = max(0, sum(sizes.layers) - spilled_bytes)
    plan = make_plan(sizes, budget, host_bytes(budget.host_bytes, in_memory))
    if not plan.streamed:
        move_tensors(model, device)
        return Placement(plan, None)
    if (embedding := host_embedding(model)) is not None:
        move_tensors(embedding, torch.device("cpu"))
        model.set_input_embeddings(HostEmbedding(embedding, device))
    _move_others(model, layers, device)
    for number in sorted(plan.resident):
        _keep(layers[number], device)
    largest = max(sizes.layers[number] for number in plan.streamed)
    slots = make_slots(min(NUM_SLOTS, len(plan.streamed)), largest, device)
    streamed = stream_layers(layers, plan, slots)
    on_host = 0 if embedding is None else embedding.num_embeddings * embedding.embedding_dim
    return Placement(plan, streamed, on_host)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model that are all alike and run one after the other."""
    number = model.config.get_text_config().num_hidden_layers
    found = [
        list(module)
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == number
    ]
    if not found:
        raise ModelError(
            f"{type(model).__name__} has no list of {number} decoder layers, so it cannot be "
            "streamed; leave device_memory out"
        )
    return max(found, key=lambda layers: sum(map(layer_bytes, layers)))


def measure(model: PreTrainedModel, layers: Sequence[nn.Module]) -> ModelSizes:
    """The memory that a model takes on the device. It is on the host now, in the form that it has
    there."""
    sizes = tuple(map(layer_bytes, layers))
    embedding = host_embedding(model)
    config = model.config.get_text_config()
    width = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * width
    itemsize = model.dtype.itemsize
    plain = all(tensor.is_floating_point() for tensor in tensors_of(layers[0]).values())
    return ModelSizes(
        layers=sizes,
        others=layer_bytes(model) - sum(sizes),
        embedding=0 if embedding is None else layer_bytes(embedding),
        per_row=(4 * width + 4 * inner) * itemsize,
        scratch=0 if plain else width * inner * itemsize,
    )


def _move_others(model: PreTrainedModel, layers: Sequence[nn.Module], device: torch.device) -> None:
    inside = {module for layer in layers for module in layer.modules()}
    for module in model.modules():
        if module not in inside:
            move_tensors(module, device, recurse=False)


def _keep(layer: nn.Module, device: torch.device) -> None:
    """Moves a layer for good. In one piece, so that the allocator rounds up once."""
    layout = SlabLayout(layer)
    slab = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    layout.save(slab)
    layout.bind(slab)


def stream_layers(layers: Sequence[nn.Module], plan: LayerPlan, slots: Slots) -> StreamedLayers:
    """Takes the weights of layers from where they are now."""
    chosen = [layers[number] for number in plan.streamed]
    num_slots, slot_bytes = slots.buffers.shape
    written = sum(layer_bytes(layers[number]) for number in plan.on_disk)
    file = layers_file(written) if plan.on_disk else None
    sizes, in_memory, places = [], {}, {}
    for number, layer in enumerate(chosen):
        layout = SlabLayout(layer)
        sizes.append(layout.num_bytes)
        if plan.streamed[number] in plan.in_memory:
            slab = in_memory[number] = host_memory(layout.num_bytes)
            layout.save(slab)
        else:
            assert file is not None
            slab = torch.empty(layout.num_bytes, dtype=torch.uint8)
            layout.save(slab)
            places[number] = (file.tell(), layout.num_bytes)
            file.write(slab.numpy().data)
        layout.bind(slots.buffers[slot_of(number, num_slots)])
    on_disk = None
    if file is not None:
        file.flush()
        staged = [host_memory(slot_bytes) for _ in range(NUM_STAGED)]
        on_disk = DiskLayers(file, places, staged)
    return StreamedLayers(chosen, sizes, slots, in_memory, on_disk)
