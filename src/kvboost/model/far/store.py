"""Which requests have far rows, and the memory they get."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from kvboost.config import format_bytes
from kvboost.errors import ConfigError, KVTooLargeError
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.codes import CodedMemory
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import FarMemory
from kvboost.model.far.place import FarPlace
from kvboost.model.far.rows import FarAttention


class FarStore:
    """Lends KV with far rows to requests that are too large for near memory. Thread-safe."""

    def __init__(
        self, shape: KVShape, place: FarPlace, *, fits_bytes: int, near_bytes: int, far_bytes: int
    ) -> None:
        """Requests of more than ``fits_bytes`` have far rows. Each of them gets ``near_bytes`` of
        near memory; ``far_bytes`` is the most for the far rows of all."""
        self.shape = shape
        self.far_bytes = far_bytes
        self._place = place
        self._fits = fits_bytes
        self.near_rows = (near_bytes - place.near_bytes) // shape.row_bytes
        if self.near_rows < place.least_near_rows:
            raise ConfigError(
                f"max_kv_bytes leaves {format_bytes(near_bytes)} of near memory for a request with "
                f"far rows; it needs {format_bytes(place.near_bytes)} for slots and at least "
                f"{place.least_near_rows} rows of {format_bytes(shape.row_bytes)}; raise "
                "max_kv_bytes"
            )
        self._attention: FarAttention | None = None
        self._live: dict[int, int] = {}
        """Bytes of far memory by a number. Removing one needs no lock: the garbage collector may
        end a request in a thread that holds it."""
        self._numbers = count()
        self._lock = threading.Lock()
        self.num_lent = 0
        """The number of requests that have had far rows."""

    @property
    def used_bytes(self) -> int:
        """The far memory of all requests that run."""
        return sum(list(self._live.values()))

    @property
    def near_bytes(self) -> int:
        """The near memory of one request."""
        return self.near_rows * self.shape.row_bytes

    @property
    def attention(self) -> FarAttention:
        """Attends to the far rows of all requests."""
        with self._lock:
            if self._attention is None:
                self._attention = self._place.attention()
            return self._attention

    def takes(self, num_tokens: int) -> bool:
        """Whether a request of so many rows has far rows."""
        return num_tokens * self.shape.row_bytes > self._fits

    def has_room(self, num_tokens: int) -> bool:
        """Whether there is far memory for one more request, beside those that run."""
        return self.used_bytes + self._place.far_bytes(num_tokens) <= self.far_bytes

    def check(self, num_tokens: int) -> None:
        """Raises KVTooLargeError if a request of so many rows could not run at all."""
        needed = self._place.far_bytes(num_tokens)
        if needed > self.far_bytes:
            raise KVTooLargeError(num_tokens, needed, self.far_bytes, "far_kv_bytes")

    @contextmanager
    def lend(self, num_tokens: int) -> Iterator[FarKV]:
        """KV for so many rows, until the context exits. Raises KVTooLargeError if there is too
        little far memory, and CacheFolderError if its folder has too little space."""
        kv = self._place.kv(self.shape, num_tokens, self.near_rows, self._allocate, self.attention)
        self.num_lent += 1
        try:
            yield kv
        finally:
            kv.close()

    def clear(self) -> None:
        """Frees what attends to far rows, if no request has any."""
        with self._lock:
            if not self._live:
                self._attention = None

    def _allocate(self, num_rows: int) -> FarMemory | CodedMemory:
        needed = self._place.far_bytes(num_rows)
        with self._lock:
            free, number = self.far_bytes - self.used_bytes, next(self._numbers)
            if needed > free:
                raise KVTooLargeError(num_rows, needed, free, "far_kv_bytes")
            self._live[number] = needed
        try:
            memory = self._place.memory(num_rows)
        except BaseException:
            del self._live[number]
            raise
        memory.on_close = partial(self._live.pop, number, None)
        return memory
