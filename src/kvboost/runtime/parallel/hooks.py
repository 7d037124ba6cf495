"""Hooks of forwards that run on several ranks, each over its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.model.execution.segment import Hook
from kvboost.reuse.probe import AttentionMass, Deviation
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift


@dataclass(frozen=True)
class HookMessage:
    """What another rank makes the same hook of."""

    make: type[Hook]
    args: tuple[Any, ...]
    """Tensors, and what has some, on the host."""

    @classmethod
    def of(cls, hook: Hook | None) -> HookMessage | None:
        if hook is None:
            return None
        assert hook.args is not None, f"other ranks do not know {type(hook).__name__}"
        return cls(type(hook), tuple(_to("cpu", arg) for arg in hook.args))

    def make_hook(self, rotation: Rotation | None, device: torch.device) -> Hook:
        args = [_to(device, arg) for arg in self.args]
        if self.make is Shift:
            args.insert(0, rotation)
        return self.make(*args)


def _to(device: torch.device | str, arg: Any) -> Any:
    return arg.to(device) if hasattr(arg, "to") else arg


def observed(hook: Hook | None) -> torch.Tensor | None:
    """What a hook has found out about this rank's heads; None if it finds out nothing. A shift
    changes each head by itself."""
    if isinstance(hook, AttentionMass):
        hook.wait()
        return hook.mass
    return hook.squared if isinstance(hook, Deviation) else None


@torch.inference_mode()
def add_up(hook: Hook, others: Sequence[torch.Tensor]) -> None:
    """Makes a hook of rank 0 know what the hooks of the other ranks have found out."""
    own = observed(hook)
    assert own is not None
    for part in others:  # in the order of the ranks, so that the sum is the same every time
        own += part.to(own.device)
    if isinstance(hook, AttentionMass):  # the mean over heads, of which every rank has as many
        own /= len(others) + 1
