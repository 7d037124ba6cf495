"""Hooks of forwards that run on several ranks, each over its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.model.segment import Hook
from kvboost.reuse.probe import AttentionMass, Bands, Deviation
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift, Spans


@dataclass(frozen=True)
class MassHook:
    bands: Bands
    start: int
    absent: torch.Tensor


@dataclass(frozen=True)
class DeviationHook:
    layer: int
    positions: torch.Tensor


@dataclass(frozen=True)
class ShiftHook:
    positions: torch.Tensor
    spans: Spans


HookMessage = MassHook | DeviationHook | ShiftHook
"""What another rank makes the same hook of."""


def describe(hook: Hook | None) -> HookMessage | None:
    if isinstance(hook, AttentionMass):
        return MassHook(hook.bands, hook.start, hook.absent.cpu())
    if isinstance(hook, Deviation):
        return DeviationHook(hook.layer, hook.positions.cpu())
    if isinstance(hook, Shift):
        return ShiftHook(hook.positions.cpu(), hook.spans.to("cpu"))
    assert hook is None, f"other ranks do not know {type(hook).__name__}"
    return None


def make_hook(
    message: HookMessage | None, rotation: Rotation | None, device: torch.device
) -> Hook | None:
    if isinstance(message, MassHook):
        return AttentionMass(message.bands, message.start, message.absent.to(device))
    if isinstance(message, DeviationHook):
        return Deviation(message.layer, message.positions.to(device))
    if isinstance(message, ShiftHook):
        assert rotation is not None
        return Shift(rotation, message.positions.to(device), message.spans.to(device))
    return None


def observed(hook: Hook | None) -> torch.Tensor | None:
    """What a hook has found out about this rank's heads; None if it finds out nothing. A shift
    changes each head by itself."""
    if isinstance(hook, AttentionMass):
        hook.wait()
        return hook.mass
    return hook.squared if isinstance(hook, Deviation) else None


def add_up(hook: Hook, others: Sequence[torch.Tensor]) -> None:
    """Makes a hook of rank 0 know what the hooks of the other ranks have found out."""
    own = observed(hook)
    assert own is not None
    for part in others:  # in the order of the ranks, so that the sum is the same every time
        own += part.to(own.device)
    if isinstance(hook, AttentionMass):  # the mean over heads, of which every rank has as many
        own /= len(others) + 1
