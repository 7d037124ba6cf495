"""One slab of pages that holds the KV of all running requests, and what is kept of ended ones."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np
import torch

from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.triton.host import send_into

PAGE = 64
"""Rows of a page: as many as the keys that a program of attention reads at a time."""
SCRATCH = 0
"""The page, and the row of the table, that padding uses."""

_serials = count(1)


class Holding:
    """The pages of one request, in order, and its row of the slab's table."""

    def __init__(self, row: int, pages: list[int]) -> None:
        self.row = row
        self.pages = pages
        self.serial = next(_serials)
        """Tells this request from others that had the same row."""


class KeptPages:
    """Pages that are kept for later requests for as long as this object lives."""

    __slots__ = ("pages", "slab")

    def __init__(self, slab: Slab, pages: Sequence[int]) -> None:
        self.slab = slab
        self.pages = pages

    def __del__(self) -> None:
        self.slab.release(self.pages)


class Slab:
    """Pages, and who holds them: requests, and what is kept for later ones. Several may hold the
    same page. ``data`` is ``[layers, pages, kv_heads, PAGE, sides * head_dim]``: the key of a row,
    then its value, or the row that is both. ``table`` is int32 ``[requests, most pages]`` on the
    device: the pages of each request. Thread-safe; ``release`` never waits.

    If requests need more pages than are free, ``free_kept`` is called with the number of pages that
    must be free, without a lock. It should let go of kept pages. ``on_low`` is called when requests
    have taken pages and fewer than ``num_spare`` are left; it should return at once."""

    def __init__(
        self, shape: KVShape, num_pages: int, num_requests: int, most_pages: int | None = None
    ) -> None:
        """``num_pages`` and ``num_requests`` do not count those for padding."""
        self.shape = shape
        self.num_pages = num_pages
        self.num_requests = num_requests
        self.page_bytes = PAGE * shape.row_bytes
        self.free_kept: Callable[[int], None] = lambda _: None
        self.on_low: Callable[[], None] = lambda: None
        self.num_spare = 0
        size = (num_pages + 1, shape.num_kv_heads, PAGE, shape.sides * shape.head_dim)
        self.data = torch.zeros(shape.num_layers, *size, dtype=shape.dtype, device=shape.device)
        self.layers = self.data.unbind(0)
        columns = min(most_pages or num_pages, num_pages)
        self.table = torch.zeros(num_requests + 1, columns, dtype=torch.int32, device=shape.device)
        self._free_pages = list(range(num_pages, 0, -1))
        self._free_rows = list(range(num_requests, 0, -1))
        self._holders = [0] * (num_pages + 1)
        """The number of requests that hold each page."""
        self._keepers = [0] * (num_pages + 1)
        """The number of times each page is kept."""
        self._num_held = 0
        self._released: deque[Holding | Sequence[int]] = deque()
        """Requests, and pages that are no longer kept."""
        self._lock = threading.Lock()

    @property
    def most_rows(self) -> int:
        """The most rows of KV that one request can have."""
        return self.table.shape[1] * PAGE

    @property
    def used_bytes(self) -> int:
        """The bytes of all pages that some request holds, each counted once."""
        with self._lock:
            self._collect()
            return self._num_held * self.page_bytes

    @property
    def num_free(self) -> int:
        """The number of pages that nobody holds."""
        with self._lock:
            self._collect()
            return len(self._free_pages)

    def rows(self, page: int) -> torch.Tensor:
        """The rows of a page, ``[sides, layers, kv_heads, PAGE, head_dim]``: a view."""
        return self.data[:, page].unflatten(-1, (self.shape.sides, -1)).permute(3, 0, 1, 2, 4)

    def keep(self, pages: Sequence[Sequence[int]]) -> list[KeptPages]:
        """Keeps pages that somebody holds now."""
        with self._lock:
            for some in pages:
                for page in some:
                    self._keepers[page] += 1
        return [KeptPages(self, some) for some in pages]

    def keep_free(self, num_pages: int) -> KeptPages | None:
        """Keeps pages that nobody holds; None if too few are free."""
        with self._lock:
            self._collect()
            if len(self._free_pages) < num_pages:
                return None
            pages = self._pop(num_pages)
            for page in pages:
                self._keepers[page] += 1
        return KeptPages(self, pages)

    def take(self, num_rows: int, shared: Sequence[int] = ()) -> Holding | None:
        """Pages for ``num_rows`` rows. The first of them are ``shared``, which others hold too.
        None if there are too few pages, or too many requests."""
        needed = max(0, pages_for(num_rows) - len(shared))
        if num_rows > self.most_rows:
            return None
        with self._free(needed):
            if len(self._free_pages) < needed or not self._free_rows:
                return None
            assert all(self._holders[page] or self._keepers[page] for page in shared)
            pages = self._add_holder([*shared, *self._pop(needed)])
            holding = Holding(self._free_rows.pop(), pages)
        self._enter(holding, 0)
        return holding

    def extend(self, holding: Holding, num_rows: int) -> bool:
        """Adds pages until ``num_rows`` rows fit; False if there are too few."""
        known = len(holding.pages)
        needed = pages_for(num_rows) - known
        if num_rows > self.most_rows:
            return False
        with self._free(needed):
            if len(self._free_pages) < needed:
                return False
            holding.pages += self._add_holder(self._pop(needed))
        self._enter(holding, known)
        return True

    def replace(self, holding: Holding, num_pages: int) -> bool:
        """Copies the first ``num_pages`` pages, which others hold too, into pages of its own; False
        if there are too few."""
        with self._free(num_pages):
            if len(self._free_pages) < num_pages:
                return False
            old, own = holding.pages[:num_pages], self._add_holder(self._pop(num_pages))
        holding.pages[:num_pages] = own
        self.data[:, own] = self.data[:, old]
        self._enter(holding, 0)
        with self._lock:
            for page in old:
                self._drop(page)
        return True

    def release(self, released: Holding | Sequence[int]) -> None:
        """Returns the pages of a request, or pages that were kept. The garbage collector may call
        this in a thread that holds any lock, so it leaves the work to the next call if it cannot
        have the slab's."""
        self._released.append(released)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def check_integrity(self) -> list[str]:
        """The problems when no request runs: none, unless there is a leak."""
        with self._lock:
            self._collect()
            faults = [f"page {page} is held" for page, n in enumerate(self._holders) if n]
            kept = [page for page, n in enumerate(self._keepers) if n]
            if self._num_held != sum(map(bool, self._holders)):
                faults.append(f"{self._num_held} pages are counted as held")
            for name, free, total in (
                ("pages", [*self._free_pages, *kept], self.num_pages),
                ("rows of the table", self._free_rows, self.num_requests),
            ):
                if sorted(free) != list(range(1, total + 1)):
                    faults.append(f"{len(free)} of {total} {name} are free")
        return faults

    def _pop(self, number: int) -> list[int]:
        at = len(self._free_pages) - number
        taken = self._free_pages[at:]
        del self._free_pages[at:]
        return taken[::-1]

    def _add_holder(self, pages: list[int]) -> list[int]:
        """``pages``, which one more request holds from now on."""
        for page in pages:
            self._num_held += not self._holders[page]
            self._holders[page] += 1
        return pages

    @contextmanager
    def _free(self, number: int) -> Iterator[None]:
        """Holds the lock, after so many pages were freed if that is possible."""
        if number > len(self._free_pages) and number > self.num_free:
            self.free_kept(number)
        with self._lock:
            self._collect()
            yield
        if len(self._free_pages) < self.num_spare:
            self.on_low()

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if not self._holders[page]:
            self._num_held -= 1
            self._free_if_unused(page)

    def _free_if_unused(self, page: int) -> None:
        if not self._holders[page] and not self._keepers[page]:
            self._free_pages.append(page)

    def _collect(self) -> None:
        while self._released:
            released = self._released.popleft()
            if isinstance(released, Holding):
                for page in reversed(released.pages):
                    self._drop(page)
                self._free_rows.append(released.row)
                continue
            for page in released:
                self._keepers[page] -= 1
                self._free_if_unused(page)

    def _enter(self, holding: Holding, start: int) -> None:
        """Writes pages from number ``start`` on into the table."""
        pages = torch.from_numpy(np.array(holding.pages[start:], np.int32))
        send_into(pages, self.table[holding.row, start : len(holding.pages)])


def pages_for(num_rows: int) -> int:
    return -(-num_rows // PAGE)
