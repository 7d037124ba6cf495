"""The messages between rank 0 and the other ranks, in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Segment
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
class Failure:
    """The answer of a rank that could not do what it was told."""

    reason: str
    fatal: bool
    """Whether the rank has ended."""


SENT = ("token_ids", "positions", "num_logits", "absent", "until", "as_stock")
"""What a segment tells other ranks beside its KV and its hook, which they have themselves."""


@dataclass(frozen=True)
class SegmentMessage:
    """The description of a segment, from which another rank makes the same one. Tensors, and what
    has some, are on the host."""

    kv: int
    fields: Mapping[str, Any]
    hook: type[Hook] | None
    hook_args: tuple[Any, ...]

    @classmethod
    def of(cls, segment: Segment, kv: int) -> SegmentMessage:
        """``kv`` is the number of its KV."""
        hook, args = segment.hook, ()
        fields = {name: _to("cpu", getattr(segment, name)) for name in SENT}
        if hook is not None:
            assert hook.args is not None, f"other ranks do not know {type(hook).__name__}"
            args = tuple(_to("cpu", arg) for arg in hook.args)
        return cls(kv, fields, None if hook is None else type(hook), args)

    def make(self, kv: RequestKV, rotation: Rotation | None) -> Segment:
        device = kv.shape.device
        fields = {name: _to(device, value) for name, value in self.fields.items()}
        args = [_to(device, arg) for arg in self.hook_args]
        if self.hook is Shift:
            args.insert(0, rotation)
        return Segment(kv, hook=None if self.hook is None else self.hook(*args), **fields)


def _to(device: torch.device | str, value: Any) -> Any:
    return value.to(device) if hasattr(value, "to") else value
