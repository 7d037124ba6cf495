"""The messages between rank 0 and the other ranks, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.model.execution.segment import Hook
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift


@dataclass(frozen=True)
class Call:
    """Tells a rank to call ``do``, a method of its ``Follower``."""

    do: Callable[..., Any]
    args: tuple[Any, ...]
    options: Mapping[str, Any]
    is_answered: bool
    """Whether rank 0 waits for an answer. A failure is then the answer; of other calls, it ends the
    rank, because its rows would be wrong."""
    released: Sequence[int] = ()
    """The buffers and chunks that rank 0 has let go of before."""


@dataclass(frozen=True)
class SegmentMessage:
    """A :class:`kvboost.model.execution.segment.Segment`."""

    kv: int
    token_ids: torch.Tensor
    positions: range | torch.Tensor
    num_logits: int
    hook: HookMessage | None
    absent: torch.Tensor | None
    until: int | None
    as_stock: bool


@dataclass(frozen=True)
class Failure:
    """The answer of a rank that could not do what it was told."""

    reason: str
    fatal: bool
    """Whether the rank has ended."""


@dataclass(frozen=True)
class HookMessage:
    """The description of a hook, from which another rank makes the same one."""

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
