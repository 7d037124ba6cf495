"""The messages that rank 0 sends to the other ranks, in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kvboost.cache.quantize import KVData
from kvboost.model.execution.segment import Hook
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift


class Message:
    answered: ClassVar[bool] = False
    """Whether rank 0 waits for an answer. A failure is then the answer; of other messages, it ends
    the rank, because its rows would be wrong."""


@dataclass(frozen=True)
class Load(Message):
    """Load your part of a model, together with rank 0. There is one model at a time."""

    name: str
    tp_size: int
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Serve(Message):
    """An engine with these options begins; the last one has ended. Its chunks are gone."""

    kv_cache_bits: int


@dataclass(frozen=True)
class NewKV(Message):
    kv: int
    num_tokens: int


@dataclass(frozen=True)
class Reserve(Message):
    kv: int
    num_tokens: int


@dataclass(frozen=True)
class Clear(Message):
    """Rows ``[start, end)`` become zero."""

    kv: int
    start: int
    end: int


@dataclass(frozen=True)
class Release(Message):
    """Rank 0 has let go of these buffers and chunks."""

    numbers: tuple[int, ...]


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
class Run(Message):
    """Run these segments, together with all ranks."""

    segments: tuple[SegmentMessage, ...]


@dataclass(frozen=True)
class Observed(Message):
    """Asks for what each hook of the last forward has observed; None for one that observes
    nothing."""

    answered = True


@dataclass(frozen=True)
class Place(Message):
    """Copy rows of a chunk that begins at position ``base``, from ``offset`` on, into rows
    ``[start, end)``. With a ``share``, mix them with what is there, which has the rest."""

    kv: int
    part: int
    base: int
    offset: int
    start: int
    end: int
    share: float | None
    turn: int = 0
    """How much further keys are rotated than the rows are moved."""


@dataclass(frozen=True)
class PackRows(Message):
    """Keep a copy of rows ``[start, end)`` as a chunk; the answer is its bits."""

    part: int
    kv: int
    start: int
    end: int
    like: int | None
    common: int
    answered = True


@dataclass(frozen=True)
class Copy(Message):
    """Keep a chunk a second time, in the memory of another kind of device."""

    part: int
    of: int
    device_type: str


@dataclass(frozen=True)
class Has(Message):
    """Is this chunk here? The answer is a bool."""

    part: int
    answered = True


@dataclass(frozen=True)
class Give(Message):
    """This chunk, in host memory; None if it is not here."""

    part: int
    answered = True


@dataclass(frozen=True)
class Take(Message):
    """Keep a chunk that rank 0 has read from a slow tier."""

    part: int
    data: KVData
    answered = True


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
