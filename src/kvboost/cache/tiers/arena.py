"""Memory for many chunks in few large blocks.

A GPU copies at full speed only from memory that is locked. To lock some takes milliseconds, during
which little else runs, and torch's own allocator rounds every piece up to a power of two. So blocks
are locked, in the background, and chunks are pieces of them.
"""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Protocol

import torch

BLOCK_BYTES = 128 * 1024**2
AHEAD = 4
"""Blocks that are made before they are needed."""
GRAIN = 64 * 1024
"""Pieces have whole multiples of this size, so that few sizes are left between them."""

GetBlock = Callable[[int], torch.Tensor]
"""Gives so many bytes of memory, uint8."""
Piece = tuple[int, int, int]
"""Number of the block, start and end."""


class Fence(Protocol):
    """Such as a CUDA event that has been recorded."""

    def query(self) -> bool:
        """Whether all has happened that was under way when it was made."""


class Arena:
    """Lends pieces of blocks, up to ``max_bytes`` of blocks in all. A piece comes back when the
    last tensor that reads it is gone, and is lent again once a fence of then has been passed: a GPU
    may still be copying from it. Thread-safe."""

    def __init__(
        self,
        get_block: GetBlock,
        max_bytes: int,
        make_fence: Callable[[], Fence],
        *,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._get_block = get_block
        self._make_fence = make_fence
        self._block_bytes = block_bytes
        self._most_blocks = -(-max_bytes // block_bytes)
        self._blocks: list[torch.Tensor] = []
        self._coming: deque[Future[torch.Tensor]] = deque()
        self._maker = ThreadPoolExecutor(1, "kvboost-memory")
        self._ends: dict[tuple[int, int], int] = {}
        """Free pieces: where each ends, by its block and start."""
        self._starts: dict[tuple[int, int], int] = {}
        """The reverse."""
        self._by_size: list[tuple[int, int, int]] = []
        """Free pieces in order: size, block, start."""
        self._returned: deque[Piece] = deque()
        """The garbage collector may return a piece in a thread that holds any lock."""
        self._fenced: deque[tuple[Fence, list[Piece]]] = deque()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The size of all blocks."""
        return len(self._blocks) * self._block_bytes

    def empty(self, likes: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """For each of ``likes`` a tensor of its shape and dtype with any content; None if it fits
        into no block, or there may be no more."""
        with self._lock:
            self._collect()
            pieces = [self._find(-(-like.nbytes // GRAIN) * GRAIN or GRAIN) for like in likes]
        return [
            None if piece is None else self._lend(piece, like)
            for piece, like in zip(pieces, likes, strict=True)
        ]

    def close(self) -> None:
        """Makes no more blocks. Pieces that are lent stay what they are."""
        self._maker.shutdown(cancel_futures=True)

    def _find(self, size: int) -> Piece | None:
        if size > self._block_bytes:
            return None
        piece = self._take(size)
        return self._take(size) if piece is None and self._grow() else piece

    def _lend(self, piece: Piece, like: torch.Tensor) -> torch.Tensor:
        block, start, _ = piece
        memory = self._blocks[block]
        lent = _lent_type(like.nbytes).from_address(memory.data_ptr() + start)
        lent.returned, lent.piece, lent.memory = self._returned, piece, memory
        # A tensor made of a buffer holds it for as long as any view of the tensor lives.
        return torch.frombuffer(lent, dtype=like.dtype).view(like.shape)

    def _grow(self) -> bool:
        """Adds a block, which is ready unless many are needed at once, and has others made."""
        try:
            made = len(self._blocks) + len(self._coming)
            for _ in range(min(1 + AHEAD - len(self._coming), self._most_blocks - made)):
                self._coming.append(self._maker.submit(self._get_block, self._block_bytes))
            if not self._coming:
                return False
            block = self._coming.popleft().result()
        except RuntimeError:  # no memory, or closed
            return False
        self._blocks.append(block)
        self._add(len(self._blocks) - 1, 0, self._block_bytes)
        return True

    def _collect(self) -> None:
        """Takes back what has been returned and is no longer read."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))]
        if returned:
            self._fenced.append((self._make_fence(), returned))
        while self._fenced and self._fenced[0][0].query():
            for piece in self._fenced.popleft()[1]:
                self._free(*piece)

    def _take(self, size: int) -> Piece | None:
        """The smallest free piece that is large enough; what is left of it stays free."""
        at = bisect_left(self._by_size, (size, 0, 0))
        if at == len(self._by_size):
            return None
        _, block, start = self._by_size[at]
        end = self._remove(block, start)
        if start + size < end:
            self._add(block, start + size, end)
        return block, start, start + size

    def _free(self, block: int, start: int, end: int) -> None:
        """Adds a piece, together with free ones on both of its sides."""
        if (before := self._starts.get((block, start))) is not None:
            self._remove(block, before)
            start = before
        if (block, end) in self._ends:
            end = self._remove(block, end)
        self._add(block, start, end)

    def _add(self, block: int, start: int, end: int) -> None:
        self._ends[block, start], self._starts[block, end] = end, start
        insort(self._by_size, (end - start, block, start))

    def _remove(self, block: int, start: int) -> int:
        """Returns where the piece ended."""
        end = self._ends.pop((block, start))
        del self._starts[block, end]
        del self._by_size[bisect_left(self._by_size, (end - start, block, start))]
        return end


@lru_cache
def _lent_type(num_bytes: int) -> Any:
    """The type of a buffer of ``num_bytes`` that keeps the ``memory`` of its block, and says that
    its ``piece`` is ``returned`` when nothing reads it any more."""
    fields = {"_type_": ctypes.c_char, "_length_": num_bytes, "__del__": _give_back}
    return type("_Lent", (ctypes.Array,), fields)


def _give_back(lent: Any) -> None:
    lent.returned.append(lent.piece)
