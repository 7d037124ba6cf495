"""The host beside a GPU: sending data without waiting, and work in one thread between forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch


def send(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``host`` on ``device``. A GPU is not waited for: the copy starts in pinned memory."""
    return _pinned(host, device).to(device, non_blocking=True)


def send_into(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copies ``host`` over ``target`` in the same way."""
    target.copy_(_pinned(host, target.device), non_blocking=True)


def to_device(
    numbers: Sequence[float] | np.ndarray[Any, Any] | torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of ``numbers``, sent in the same way."""
    if not isinstance(numbers, torch.Tensor):
        numbers = torch.tensor(numbers, dtype=dtype)
    return send(numbers.to(dtype), device)


class HostCopy:
    """A copy of a tensor on the host, which starts at once."""

    def __init__(self, there: torch.Tensor, *, sleeps: bool = False) -> None:
        """A thread that waits takes a processor's whole time, unless it ``sleeps``: then it goes on
        some microseconds later."""
        self.is_done: Callable[[], bool] | None = None
        """Whether ``values`` are there, if a GPU may still be at it."""
        self.wait: Callable[[], None] = lambda: None
        """Returns when they are."""
        if there.device.type != "cuda":
            self.values = there.clone()
            return
        self.values = torch.empty(there.shape, dtype=there.dtype, pin_memory=True)
        self.values.copy_(there, non_blocking=True)
        copied = torch.cuda.Event(blocking=sleeps)
        copied.record()
        self.is_done, self.wait = copied.query, copied.synchronize

    @cached_property
    def numbers(self) -> list[int]:
        """All of them. Waits."""
        self.wait()
        found: list[int] = self.values.tolist()
        return found


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream for work beside that of the current one; None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Launches on ``stream``, if there is one, what may run at the same time as that which the
    current stream gets next; that stream must wait for it then."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch spreads work on the host over all cores, and waking them takes longer than the little
    that is to be done between two forwards on a GPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _pinned(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    is_sent = device.type == "cuda" and host.device.type == "cpu" and host.numel() > 0
    return host.pin_memory() if is_sent else host
