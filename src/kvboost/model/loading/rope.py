"""The rotation of a loaded model's keys, measured layer by layer.

A token that stands alone attends only to itself. So its hidden states are the same at every
position, in all layers, and its keys differ only by what the model does with the position. The
frequencies are those that the model's rotary embedding holds. Which of them a layer uses, in which
layout and direction, and whether the layer rotates at all, is what its keys show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvboost.errors import UnsupportedModelError
from kvboost.model.execution.caches import Observed
from kvboost.model.loading.compat import Positions, Support, context_length

FURTHEST = 1009
"""The position at which keys are compared with those at 0, if the model allows as many."""
ROUNDING = {torch.float32: 1e-3, torch.float64: 1e-3}
COARSE_ROUNDING = 2**-4
"""The largest error of keys that is taken for rounding, relative to the largest of their layer.
Keys of 16 bits are products of numbers of 16 bits."""


@dataclass(frozen=True)
class KeyRotation:
    """``frequencies`` are ``[pairs]`` for each layer that has KV, radians per position, zeros for
    layers without positions. ``interleaved``: pairs are neighbouring channels, not the two
    halves."""

    frequencies: list[torch.Tensor]
    interleaved: bool


def probed_positions(model: PreTrainedModel, support: Support) -> tuple[int, ...]:
    """The positions at which ``key_rotation`` needs to see a token; none if keys do not rotate."""
    architecture = support.architecture
    if architecture.positions is not Positions.ROPE or architecture.states:
        return ()
    ends = (FURTHEST + 1, support.reuse_limit, context_length(model.config))
    return 0, min(end for end in ends if end) - 1


def key_rotation(
    model: PreTrainedModel, support: Support, observed: Observed, *, strict: bool
) -> KeyRotation | None:
    """The rotation of the keys of all layers; None where positions are not rotary. If what the
    position does to a token is no such rotation, raises UnsupportedModelError, or returns None
    where that is allowed (not ``strict``)."""
    positions = probed_positions(model, support)
    if not positions:
        return None
    try:
        return _measured(model, positions[1], observed)
    except UnsupportedModelError:
        if strict:
            raise
        return None


def _measured(model: PreTrainedModel, position: int, observed: Observed) -> KeyRotation:
    """``observed`` shows a token at 0 and at ``position``."""
    name = type(model).__name__
    limit = ROUNDING.get(observed.shape.dtype, COARSE_ROUNDING)
    held = _held_frequencies(model)
    found: list[torch.Tensor] = []
    layouts: set[bool] = set()
    for layer, keys, values in zip(observed.layers, observed.keys, observed.values, strict=True):
        if _distance(values[1], values[0]) > limit:
            raise UnsupportedModelError(
                f"{name}: values of layer {layer} depend on their position, so text that moved "
                "cannot be reused. strict=False gives exact prefix reuse"
            )
        candidates = list(_candidates(held(layer)[: keys.shape[2] // 2]))
        errors = [
            _distance(_rotated(keys[0], position * frequencies, interleaved), keys[1])
            for frequencies, interleaved in candidates
        ]
        if not min(errors) <= limit:
            raise UnsupportedModelError(
                f"{name}: keys of layer {layer} change with their position in a way that KVBoost "
                "does not know, so text that moved cannot be reused. strict=False gives exact "
                "prefix reuse"
            )
        frequencies, interleaved = candidates[errors.index(min(errors))]
        found.append(frequencies)
        layouts |= {interleaved} if frequencies.any() else set()
    if len(layouts) > 1:
        raise UnsupportedModelError(
            f"{name}: some layers rotate halves of a key, and others neighbouring channels. "
            "KVBoost does the same in all. strict=False gives exact prefix reuse"
        )
    return KeyRotation(_even_widths(name, found, observed.keys), layouts == {True})


def _even_widths(
    name: str, found: list[torch.Tensor], keys: list[torch.Tensor]
) -> list[torch.Tensor]:
    """As many frequencies for each layer without positions as for others whose KV is like its
    own."""
    widths: dict[torch.Size, set[int]] = {}
    for frequencies, of_layer in zip(found, keys, strict=True):
        of_shape = widths.setdefault(of_layer.shape, set())
        of_shape |= {len(frequencies)} if frequencies.any() else set()
        if len(of_shape) > 1:
            raise UnsupportedModelError(
                f"{name}: some layers rotate more channels of a key than others whose keys are as "
                "wide. KVBoost rotates as many in all. strict=False gives exact prefix reuse"
            )
    return [
        each if each.any() else each.new_zeros(max(widths[of_layer.shape], default=1))
        for each, of_layer in zip(found, keys, strict=True)
    ]


def _held_frequencies(model: PreTrainedModel) -> Callable[[int], torch.Tensor]:
    """The frequencies that the model's rotary embedding holds for a layer."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    # A vision tower may have one of its own. What ModernBERT calls its decoder is its head.
    rotary = _rotary(model.get_decoder()) or _rotary(model)

    def held(layer: int) -> torch.Tensor:
        # Layers have one rotary embedding together, or each has one of its own.
        buffers = rotary[layer if len(rotary) > layer else 0] if rotary else {}
        kind = kinds[layer] if kinds else ""
        # Gemma 3 has frequencies for each kind of layer. Where long prompts change the frequencies,
        # the original ones rotate short prompts.
        names = (f"{kind}_original_inv_freq", "original_inv_freq", f"{kind}_inv_freq", "inv_freq")
        return next((buffers[name] for name in names if name in buffers), torch.zeros(1).double())

    return held


def _rotary(part: torch.nn.Module) -> list[dict[str, torch.Tensor]]:
    """The buffers of every rotary embedding in a part of a model."""
    return [
        {name: buffer.detach().cpu().double() for name, buffer in module.named_buffers()}
        for name, module in part.named_modules()
        if name.split(".")[-1] == "rotary_emb"
    ]


def _candidates(frequencies: torch.Tensor) -> Iterator[tuple[torch.Tensor, bool]]:
    """Frequencies and layouts that a layer may rotate by, the likely ones first."""
    for interleaved in (False, True):
        yield frequencies, interleaved
        yield -frequencies, interleaved  # NanoChat rotates backwards
    yield torch.zeros_like(frequencies), False


def _rotated(keys: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """``keys``, ``[kv_heads, head_dim]``, with each pair of channels rotated by its angle."""
    pairs = len(angles)
    rotating, others = keys[:, : 2 * pairs].double(), keys[:, 2 * pairs :].double()
    split = (pairs, 2) if interleaved else (2, pairs)
    halves = rotating.unflatten(1, split).movedim(2 if interleaved else 1, 0)
    turned = torch.complex(*halves) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat(
        [torch.stack([turned.real, turned.imag], 2 if interleaved else 1).flatten(1), others], 1
    )


def _distance(given: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the number that is furthest off, relative to the largest."""
    largest = expected.double().abs().max()
    return float((given.double() - expected.double()).abs().max() / largest) if largest else 0.0
