"""What was made of images, kept as far as memory for it goes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """By the digest of an image. Those that were used longest ago go first, and the last one stays
    whatever its size. Thread-safe."""

    def __init__(self, most_bytes: int, size: Callable[[Made], int]) -> None:
        self.most_bytes = most_bytes
        self._size = size
        self._made: OrderedDict[bytes, Made] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, digest: bytes) -> Made | None:
        with self._lock:
            if digest in self._made:
                self._made.move_to_end(digest)
            return self._made.get(digest)

    def put(self, digest: bytes, made: Made) -> None:
        with self._lock:
            if digest in self._made:
                return
            self._made[digest] = made
            self._num_bytes += self._size(made)
            while self._num_bytes > self.most_bytes and len(self._made) > 1:
                _, old = self._made.popitem(last=False)
                self._num_bytes -= self._size(old)
