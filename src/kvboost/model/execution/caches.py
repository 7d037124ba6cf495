"""The caches that transformers sees as ``past_key_values``.

A model may have layers without KV of their own: layers that read what an earlier layer stored, and
layers of another kind. KVBoost numbers those that have KV from zero on; ``layers`` gives the number
of each of the model's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvboost.errors import UnsupportedModelError
from kvboost.model.execution import attention
from kvboost.model.execution.attention import Batch
from kvboost.model.execution.kv_shape import AnyShape, shape_of
from kvboost.model.execution.latent import check_latents, join
from kvboost.model.execution.scans import begin_with
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import (
    RowStates,
    StackedStates,
    StateCalls,
    StateShape,
    shape_of_states,
)
from kvboost.model.loading.unsupported import WHY_NOT


class PackedCache:
    """Writes the fresh rows of a batch and returns them. Of a layer with latents, both are the rows
    to store."""

    def __init__(self, batch: Batch, layers: Mapping[int, int], *, latent: bool = False) -> None:
        """``latent``: the model gives latents and the parts of keys that rotate."""
        self.batch = batch
        self._layers = layers
        self._latent = latent

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.batch.pause()
        layer = self._layers[layer_idx]
        if self._latent:
            keys = values = join(keys, values)
        self.batch.write(layer, keys, values)
        setattr(keys, attention.BATCH, (self.batch, layer))
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """For a layer, what to add to the numbers of the packed rows to get their positions: some
        layers of Llama 4 depend on positions without RoPE."""
        return 0 if layer_idx is None else self.batch.offsets

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0


class SequenceCache:
    """``past_key_values`` of one sequence for a model with its own attention: ``update`` returns
    all rows so far, as transformers' own cache does, without concatenating."""

    is_compileable = False

    def __init__(
        self,
        segment: Segment,
        layers: Mapping[int, int],
        between_parts: Callable[[], None] | None = None,
    ) -> None:
        assert isinstance(segment.positions, range), "only a sequence without gaps"
        self._segment = segment
        self._layers = layers
        self._between_parts = between_parts
        self._lengths: dict[int, int] = {}

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        segment = self._segment
        if self._between_parts is not None:
            self._between_parts()
        layer = self._layers[layer_idx]
        segment.kv.write(layer, segment.positions, keys, values)
        self._lengths[layer_idx] = segment.end
        return segment.kv.layer(layer, 0, segment.end)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lengths.get(layer_idx, self._segment.first)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._segment.first + query_length, 0


class StatefulCache(StateCalls, SequenceCache):
    """The same for a model that also has layers with a state in place of rows."""

    def __init__(
        self,
        segment: Segment,
        layers: Mapping[int, int],
        states: RowStates,
        between_parts: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(segment, layers, between_parts)
        self.states = states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self._between_parts is not None:
            self._between_parts()  # all these layers begin with it
        return super().get_conv_state(layer_idx, state_idx)


class ScanCache(StatefulCache):
    """The same for a model whose scans of several rows do not ask for their state."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_recurrent_state(layer_idx, state_idx)
        begin_with(state)
        return state


class StepCache(StateCalls, PackedCache):
    """``past_key_values`` of a decode step of several requests, for a model with states. The model
    has a sequence for each, ``[requests, ..., 1, ...]``, and the batch one row."""

    def __init__(self, batch: Batch, layers: Mapping[int, int], states: StackedStates) -> None:
        super().__init__(batch, layers)
        self.states = states

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(keys.transpose(0, 2), values.transpose(0, 2), layer_idx)


@dataclass(frozen=True)
class Observed:
    """The keys and values that a model gave for one token, at each position that was asked for."""

    shape: AnyShape
    """Of its KV."""
    layers: Mapping[int, int]
    """For each of the model's layers that has KV of its own, its number among them."""
    num_logits: int
    keys: list[torch.Tensor]
    """``[positions, kv_heads, head_dim]`` for each of these layers; where a row is both key and
    value, the row."""
    values: list[torch.Tensor]
    states: StateShape
    """The states of layers without rows, or of layers beside their rows."""


class ShapeProbe(StateCalls, PackedCache):
    """Records every layer's keys and values, and its states, instead of keeping them."""

    def __init__(self, *, latent: bool = False) -> None:
        super().__init__(Batch(()), {}, latent=latent)
        self.states = RowStates(StateShape((), ()))
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._latent:
            check_latents(layer_idx, keys, values)
        elif keys.shape != values.shape:
            raise UnsupportedModelError(
                f"layer {layer_idx} has keys of shape {tuple(keys.shape)} and values of shape "
                f"{tuple(values.shape)}; KVBoost keeps them in one tensor and needs them alike"
            )
        if layer_idx in self.seen:
            raise UnsupportedModelError(
                f"layer {layer_idx} writes keys and values twice for one token; KVBoost keeps one "
                "row per token and layer"
            )
        # What serves as values is the latent: it does not depend on the position.
        self.seen[layer_idx] = (join(keys, values), keys) if self._latent else (keys, values)
        return keys, values


def observe(
    model: PreTrainedModel, positions: Sequence[int] = (), *, latent: bool = False
) -> Observed:
    """Runs one token through the unchanged model, alone at each of ``positions``, where attention
    is replaced by what it comes to. Without positions the model chooses its own, once. ``latent``:
    its layers keep latents."""
    probe = ShapeProbe(latent=latent)
    # Not one of the first tokens: a padding token's embedding, and so its keys, may be zero.
    token = model.get_input_embeddings().num_embeddings // 2
    tokens = torch.full((max(1, len(positions)), 1), token, device=model.device)
    known = WHY_NOT.get(str(model.config.model_type))
    reason = f". It {known}" if known else ""
    chosen = {"position_ids": torch.tensor(positions, device=model.device)[:, None]}
    own_attention = model.config._attn_implementation
    try:
        if positions:
            model.set_attn_implementation(attention.ALONE)
        with torch.inference_mode():
            logits = model(
                input_ids=tokens,
                past_key_values=probe,
                use_cache=True,
                **(chosen if positions else {}),
            ).logits
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on a plain key/value cache "
            f"({type(error).__name__}: {error}); KVBoost cannot reuse what it reads"
            f"{reason}"
        ) from error
    finally:
        if positions:
            model.set_attn_implementation(own_attention)
    if not probe.seen:
        raise UnsupportedModelError(
            f"{type(model).__name__} keeps no keys and values: there is nothing to reuse{reason}"
        )
    layers = {layer: number for number, layer in enumerate(sorted(probe.seen))}
    keys, values = zip(*(probe.seen[layer] for layer in layers), strict=True)
    return Observed(
        shape_of([of_layer[:1] for of_layer in keys], 1 if latent else 2),
        layers,
        int(logits.shape[-1]),
        [of_layer[:, :, 0].cpu() for of_layer in keys],
        [of_layer[:, :, 0].cpu() for of_layer in values],
        shape_of_states(probe.states),
    )
