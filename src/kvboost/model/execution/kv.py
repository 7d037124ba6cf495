"""A request's keys and values: preallocated, written in place, never concatenated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.partial_attention import Part, attend_part

if TYPE_CHECKING:
    from kvboost.model.adapters.adapter import AppliedAdapter
    from kvboost.model.execution.states import RowStates
    from kvboost.model.far.store import FarStore
    from kvboost.model.paged.slab import Holding, Slab

_ROUND = 256  # capacities are multiples of this, so that a buffer fits many requests


class Prefix:
    """The first ``count`` rows of a request. They are written, and several requests read them."""

    pages: Sequence[int] | None = None
    """The pages that they fill; None if they are in a buffer."""

    def __init__(self, count: int) -> None:
        self.count = count


class SharedRows(Prefix):
    """The first rows of a buffer. ``keys`` and ``values`` are views per layer, ``[1, kv_heads,
    count, head_dim]``."""

    is_far = False
    """Whether they are outside of the memory that the model computes in."""

    def __init__(self, data: torch.Tensor, count: int, shorter: SharedRows | None = None) -> None:
        super().__init__(count)
        self.data = data
        self._shorter: dict[int, SharedRows] = {}
        if shorter is not None:
            self._shorter = {shorter.count: shorter, **shorter._shorter}
        self.keys, self.values = _by_layer(data.narrow(3, 0, count))

    def first(self, count: int) -> SharedRows:
        """The first ``count`` of them; every call returns the same object."""
        if count >= self.count:
            return self
        return self._shorter.setdefault(count, SharedRows(self.data, count))

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> Part:
        """Attention of ``query``, ``[1, heads, rows, dim]``, over all of them in one layer."""
        return attend_part(query, self.keys[layer], self.values[layer], scale)


class RequestKV:
    """Row ``p`` holds the token at position ``p``. ``data`` is ``[2, layers, kv_heads, capacity,
    head_dim]``, keys first, or has one side that is both. It holds the rows from ``start`` on; rows
    that were never written hold arbitrary finite numbers. The rows of ``base`` are read from there
    and never written::

        base   |=====================|
        data                         |------------|      start = base.count
        data   |---------------------------------|       start = 0: base is a prefix of data
    """

    adapter: AppliedAdapter | None = None
    """The adapter that the request's rows are computed with."""
    shares = True
    """Whether other requests may read its first rows."""
    changes_rows = True
    """Whether rows anywhere may be written again, as a repair does."""
    is_exact = True
    """Whether rows stay as they were written."""
    runs_ahead = False
    """Whether a device may run its next rows before it is asked for them, and others beside."""
    is_far = False
    """Whether some of its rows may be in slower memory."""
    slab: Slab | None = None
    """Where its pages are; None if it has a buffer."""
    holding: Holding
    """Its pages, if it has some."""
    states: RowStates | None = None
    """The states of layers that have no rows; None until a forward of such a model."""

    def __init__(self, shape: KVShape, num_tokens: int) -> None:
        self.shape = shape
        self.base: SharedRows | None = None
        self.start = 0
        self._hold(shape.allocate(-(-num_tokens // _ROUND) * _ROUND))

    def _hold(self, data: torch.Tensor) -> None:
        self.data = data
        # A view per layer, made once: on a GPU every view made per step costs as much as a kernel.
        self._keys, self._values = _by_layer(data)

    @property
    def number(self) -> int | None:
        """The number by which other ranks know it; None if there are no others."""
        return None

    @property
    def groups(self) -> Sequence[RequestKV]:
        """As those of :class:`MixedKV`: there is one."""
        return (self,)

    @property
    def capacity(self) -> int:
        """One past the last position that fits."""
        return self.start + self.data.shape[3]

    @property
    def own_start(self) -> int:
        """The first position that is not read from ``base``."""
        return 0 if self.base is None else self.base.count

    @property
    def most_rows(self) -> int | None:
        """The most rows of one forward, if there is such a limit."""
        return None

    @property
    def positions_on(self) -> torch.device:
        """Where the positions of rows to write are needed."""
        return self.shape.device

    def attach_prefix(self, base: SharedRows | None) -> None:
        """Begins a new request after ``base``; earlier rows are discarded."""
        self.base = base
        self.start = self.own_start
        self.adapter = self.states = None

    def share(self, count: int) -> SharedRows:
        """At most the first ``count`` rows, which must be written, for another request to read.
        They must not change from now on."""
        if self.start == 0 and (self.base is None or count > self.base.count):
            self.base = SharedRows(self.data, count, self.base)
        assert self.base is not None
        return self.base.first(count)

    def prepare_repair(self) -> None:
        """Hooks of a repair need all rows in one piece."""
        if self.base is not None:
            self.detach_prefix()

    def detach_prefix(self) -> None:
        """Copies the rows of ``base`` into a buffer of its own."""
        if self.base is not None:
            whole = self.shape.allocate(self.capacity)
            whole[:, :, :, : self.base.count] = self.base.data[:, :, :, : self.base.count]
            self.base, self.start = None, 0
            self._hold(whole)

    def reserve(self, num_tokens: int) -> None:
        """Grows to hold ``num_tokens`` rows, at least doubling; keeps the written rows."""
        if num_tokens <= self.capacity:
            return
        kept = self.own_start - self.start  # other requests read these: they stay in the old buffer
        rows = max(num_tokens - self.own_start, 2 * self.data.shape[3] - kept)
        grown = self.shape.allocate(-(-rows // _ROUND) * _ROUND)
        grown[:, :, :, : self.data.shape[3] - kept] = self.data[:, :, :, kept:]
        self.start = self.own_start
        self._hold(grown)

    def prepare(self, first: int, end: int) -> None:
        """Makes space for rows ``[first, end)``, which are computed next. Rows before ``first`` are
        written, and do not change any more."""
        self.reserve(end)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)``: a view, unless some of them are in ``base``."""
        if start >= self.start:
            return self.data[:, :, :, start - self.start : end - self.start]
        assert self.base is not None
        shared = self.base.data[:, :, :, start : min(end, self.start)]
        if end <= self.start:
            return shared
        return torch.cat([shared, self.data[:, :, :, : end - self.start]], dim=3)

    @contextmanager
    def filling(self, start: int, end: int) -> Iterator[torch.Tensor]:
        """Rows ``[start, end)`` of all layers, ``[2, layers, kv_heads, rows, head_dim]``, to be
        overwritten until the context exits. They must be the request's own."""
        yield self.rows(start, end)

    def clear(self, start: int, end: int) -> None:
        """Makes rows ``[start, end)`` of all layers zero. They must be the request's own."""
        with self.filling(start, end) as rows:
            rows.zero_()

    @contextmanager
    def changing(
        self, layer: int, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One layer's keys and values in rows ``[start, end)``, ``[1, kv_heads, rows, head_dim]``,
        to be changed until the context exits. They must be the request's own."""
        yield self.layer(layer, start, end)

    @property
    def nbytes(self) -> int:
        """The bytes of its buffer."""
        return self.data.nbytes

    @property
    def is_lent_on(self) -> bool:
        """Whether other requests may read its buffer, which lives as long as they do."""
        return self.base is not None and self.base.data is self.data

    def memory(self) -> dict[int, int]:
        """The memory that this request's rows are in: bytes by an identity, so that what several
        requests share is counted once."""
        held = {id(self.data): self.data.nbytes}
        if self.states is not None:
            held[id(self.states)] = self.states.nbytes
        if self.base is not None:
            held[id(self.base.data)] = self.base.data.nbytes
        return held

    @property
    def spared_bytes(self) -> int:
        """The bytes that this request would need in addition if it shared nothing."""
        if self.base is None or self.base.data is self.data:
            return 0
        return self.base.count * self.shape.row_bytes

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Writes fresh rows of one layer; ``keys`` and ``values`` are ``[1, kv_heads, rows,
        head_dim]``."""
        if isinstance(positions, range):
            first = positions.start - self.start
            self._keys[layer].narrow(2, first, len(positions)).copy_(keys)
            if self._values is not self._keys:
                self._values[layer].narrow(2, first, len(positions)).copy_(values)
        else:
            rows = positions - self.start if self.start else positions
            self._keys[layer].index_copy_(2, rows, keys)
            if self._values is not self._keys:
                self._values[layer].index_copy_(2, rows, values)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values in rows ``[start, end)``, ``[1, kv_heads, rows, head_dim]``:
        views, unless some of them are in ``base``."""
        if start >= self.start:
            first, length = start - self.start, end - start
            return (
                self._keys[layer].narrow(2, first, length),
                self._values[layer].narrow(2, first, length),
            )
        assert self.base is not None
        shared = min(end, self.start) - start
        return tuple(  # type: ignore[return-value]
            torch.cat(
                [theirs[layer].narrow(2, start, shared), own[layer][:, :, : end - start - shared]],
                2,
            )
            for theirs, own in ((self.base.keys, self._keys), (self.base.values, self._values))
        )


class LayerRows(Protocol):
    """The rows of a request as hooks see them, one layer at a time: see :class:`RequestKV`."""

    @property
    def shape(self) -> KVShape: ...

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]: ...

    def changing(
        self, layer: int, start: int, end: int
    ) -> AbstractContextManager[tuple[torch.Tensor, torch.Tensor]]: ...


Layers = tuple[torch.Tensor, ...]
"""One tensor for each layer."""


def _by_layer(data: torch.Tensor) -> tuple[Layers, Layers]:
    """Views of keys and values, ``[1, kv_heads, tokens, head_dim]`` for each layer: the same ones
    where a row is both."""
    sides = [side.unsqueeze(1).unbind(0) for side in data.unbind(0)]
    return sides[0], sides[-1]


class KVPool:
    """Lends KV buffers to requests. Fresh memory costs a page fault every 4 KiB, five times the
    cost of copying a hit, so the last few buffers are kept for the next requests."""

    far: FarStore | None = None
    """Lends to requests that are too large for this pool, if they may have far rows."""

    def __init__(
        self,
        shape: KVShape,
        max_idle: int = 2,
        max_idle_bytes: int = 1024**3,
        *,
        make: Callable[[KVShape, int], RequestKV] = RequestKV,
    ) -> None:
        """``make`` gives KV of ``shape`` for so many rows."""
        self.shape = shape
        self._make = make
        self._max_idle = max_idle
        self._max_idle_bytes = max_idle_bytes
        self._idle: list[RequestKV] = []
        self._lock = threading.Lock()
        self._state_bytes, self._state_every = 0, 1

    @contextmanager
    def lend(self, num_tokens: int, base: Prefix | None = None) -> Iterator[RequestKV]:
        """A buffer for at least ``num_tokens`` rows, including those of ``base``, until the context
        is left."""
        if self.far is not None and self.far.takes(num_tokens):
            with self.far.lend(num_tokens) as far:
                yield far
            return
        kv = self._take(num_tokens - (base.count if base else 0))
        kv.attach_prefix(base)  # type: ignore[arg-type]  # of the kind that this pool's KV shares
        del base  # it is freed with the last request that reads it
        try:
            yield kv
        finally:
            self._give(kv)

    def check_integrity(self) -> list[str]:
        """The problems of memory that no request has; none, where requests have buffers."""
        return []

    def count_states(self, nbytes: int, every: int) -> None:
        """Requests also have states of ``nbytes``, and a copy for every so many rows."""
        self._state_bytes, self._state_every = nbytes, every

    def state_bytes(self, num_tokens: int) -> int:
        """The memory of a request's states, about: those of its last row, those that the next
        forward makes, the copies, and one where its prompt ends."""
        return self._state_bytes * (3 + num_tokens // self._state_every)

    def bytes_for(self, num_tokens: int) -> int:
        """The memory that ``lend`` would use now for so many rows of a request's own."""
        if self.far is not None and self.far.takes(num_tokens):
            return self.far.near_bytes
        with self._lock:
            idle = self._fitting(num_tokens)
        rows = idle.capacity if idle is not None else -(-num_tokens // _ROUND) * _ROUND
        return rows * self.shape.row_bytes + self.state_bytes(num_tokens)

    def _take(self, num_tokens: int) -> RequestKV:
        with self._lock:
            idle = self._fitting(num_tokens)
            if idle is not None:
                self._idle.remove(idle)
                return idle
        return self._make(self.shape, num_tokens)

    def _fitting(self, num_tokens: int) -> RequestKV | None:
        fitting = (kv for kv in self._idle if kv.capacity >= num_tokens)
        return min(fitting, key=lambda kv: kv.capacity, default=None)

    def _give(self, kv: RequestKV) -> None:
        if kv.is_lent_on:
            return  # it is freed with the last of those who read it
        kv.attach_prefix(None)
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
        return sum(kv.nbytes for kv in self._idle)

    def clear(self) -> None:
        """Frees the buffers that no request uses."""
        with self._lock:
            self._idle.clear()
        if self.far is not None:
            self.far.clear()

    @property
    def idle_bytes(self) -> int:
        with self._lock:
            return self._idle_bytes()
