"""Tiny models of which some layers are streamed through slots that spoil what they should not
hold."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.model.loading.load import wrap
from kvboost.model.streaming.layers import StreamedLayers
from kvboost.model.streaming.place import Placement, decoder_layers, stream_layers
from kvboost.model.streaming.plan import LayerPlan
from kvboost.model.streaming.slabs import layer_bytes
from support.late_slots import LateSlots
from support.tiny import DEVICE, OTHER_MODELS, byte_tokenizer, tiny_model

LAYERS = 6


def stream(
    model: PreTrainedModel,
    resident: Collection[int] = (),
    num_slots: int = 2,
    on_disk: Collection[int] = (),
) -> tuple[LateSlots, Placement]:
    """Streams all layers that are not resident."""
    layers = decoder_layers(model)
    every = frozenset(range(len(layers)))
    disk = frozenset(on_disk) - frozenset(resident)
    plan = LayerPlan(frozenset(resident), every - frozenset(resident) - disk, disk, 1 << 24, 2048)
    slots = LateSlots(num_slots, max(map(layer_bytes, layers)), torch.device(DEVICE))
    streamed = stream_layers(layers, plan, slots)
    return slots, Placement(plan, streamed)


def streamed_of(placement: Placement) -> StreamedLayers:
    assert placement.streamed is not None
    return placement.streamed


def streamed_engine(
    name: str = "llama",
    *,
    num_layers: int = LAYERS,
    resident: Collection[int] = (1, 4),
    num_slots: int = 2,
    **config: Any,
) -> tuple[KVBoost, LateSlots]:
    """An engine over a model with streamed layers."""
    model = tiny_model(name, num_hidden_layers=num_layers)
    found: list[LateSlots] = []

    def move(model: PreTrainedModel) -> Placement:
        slots, placement = stream(model, resident, num_slots)
        found.append(slots)
        return placement

    loaded = wrap(model, byte_tokenizer(), strict=name not in OTHER_MODELS, move=move)
    options = {"chunk_size": 16, "speculate": "off", **config}
    return KVBoost(loaded, EngineConfig(**options)), found[0]
