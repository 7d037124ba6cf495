"""A request's keys and values: preallocated, written in place, never concatenated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

_ROUND = 256  # capacities are multiples of this, so that a buffer fits many requests


@dataclass(frozen=True)
class KVShape:
    """What one token's KV looks like in a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def allocate(self, num_tokens: int) -> torch.Tensor:
        return torch.empty(
            (2, self.num_layers, self.num_kv_heads, num_tokens, self.head_dim),
            dtype=self.dtype,
            device=self.device,
        )


class RequestKV:
    """Row ``p`` holds the token at position ``p``. ``data`` is ``[2, layers, kv_heads, capacity,
    head_dim]``, keys first; rows that were never written hold anything."""

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.shape = shape
        self._hold(shape.allocate(-(-num_tokens // _ROUND) * _ROUND))

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        # A view per layer, made once: on a GPU every view made per step costs as much as a kernel.
        self._keys, self._values = (half.unsqueeze(1).unbind(0) for half in data.unbind(0))

    @property
    def capacity(self) -> int:
        return self.data.shape[3]

    def reserve(self, num_tokens: int) -> None:
        """Makes room for ``num_tokens`` rows; grows by doubling and keeps what is written."""
        if num_tokens <= self.capacity:
            return
        grown = self.shape.allocate(max(num_tokens, 2 * self.capacity))
        grown[:, :, :, : self.capacity] = self.data
        self._hold(grown)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """A view of rows ``[start, end)``."""
        return self.data[:, :, :, start:end]

    def copy_rows(self, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` as a contiguous tensor of their own in host memory, pinned when
        they come from a GPU."""
        view = self.rows(start, end)
        on_gpu = view.device.type == "cuda"
        copy = torch.empty(view.shape, dtype=view.dtype, device="cpu", pin_memory=on_gpu)
        return copy.copy_(view)

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes fresh rows of one layer; ``keys`` and ``values`` are ``[1, kv_heads, rows,
        head_dim]``."""
        if isinstance(positions, range):
            self._keys[layer].narrow(2, positions.start, len(positions)).copy_(keys)
            self._values[layer].narrow(2, positions.start, len(positions)).copy_(values)
        else:
            self._keys[layer].index_copy_(2, positions, keys)
            self._values[layer].index_copy_(2, positions, values)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of one layer's keys and values in rows ``[start, end)``: ``[1, kv_heads, rows,
        head_dim]``."""
        length = end - start
        return (
            self._keys[layer].narrow(2, start, length),
            self._values[layer].narrow(2, start, length),
        )


class KVPool:
    """Hands out request KV and takes it back. Fresh memory costs a page fault every 4 KiB, five
    times the copy of a hit, so the last few buffers are kept for the next requests."""

    def __init__(self, shape: KVShape, max_idle: int = 2, max_idle_bytes: int = 1024**3) -> None:
        self.shape = shape
        self._max_idle = max_idle
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[RequestKV] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, num_tokens: int) -> Iterator[RequestKV]:
        """A buffer for at least ``num_tokens`` rows until the context is left."""
        kv = self._take(num_tokens)
        try:
            yield kv
        finally:
            self._give(kv)

    def _take(self, num_tokens: int) -> RequestKV:
        with self._lock:
            fitting = [kv for kv in self._idle if kv.capacity >= num_tokens]
            if fitting:
                best = min(fitting, key=lambda kv: kv.capacity)
                self._idle.remove(best)
                return best
        return RequestKV(self.shape, num_tokens)

    def _give(self, kv: RequestKV) -> None:
        # Never waits: the garbage collector may run this in a thread that holds the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._idle.append(kv)
            while len(self._idle) > self._max_idle or self._idle_bytes() > self._max_idle_bytes:
                self._idle.pop(0)
        finally:
            self._lock.release()

    def _idle_bytes(self) -> int:
        return sum(kv.data.nbytes for kv in self._idle)

    def clear(self) -> None:
        """Lets go of the buffers that nobody uses."""
        with self._lock:
            self._idle.clear()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return self._idle_bytes()
