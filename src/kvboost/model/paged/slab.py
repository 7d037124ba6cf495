"""One slab of pages that holds the KV of all running requests."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from kvboost.model.kv import KVShape
from kvboost.model.triton.host import send_into

PAGE = 64
"""Rows of a page: as many as the keys that a program of attention reads at a time."""
SCRATCH = 0
"""The page, and the row of the table, that padding uses."""

_serials = count(1)


class Holding:
    """The pages of one request, in order, and its row of the slab's table; ``SCRATCH`` if it only
    holds them."""

    def __init__(self, row: int, pages: list[int]) -> None:
        self.row = row
        self.pages = pages
        self.serial = next(_serials)
        """Tells this request from others that had the same row."""


class Slab:
    """Pages, and which requests hold them; several may hold the same page. ``data`` is ``[layers,
    pages, kv_heads, PAGE, 2 * head_dim]``: the key of a row, then its value. ``table`` is int32
    ``[requests, most pages]`` on the device: the pages of each request. Thread-safe; ``release``
    never waits.

    Pages can also be *retained* after their request has ended. They hold back no request: those
    that no request holds are freed when pages are needed, the ones used longest ago first."""

    def __init__(
        self, shape: KVShape, num_pages: int, num_requests: int, most_pages: int | None = None
    ) -> None:
        """``num_pages`` and ``num_requests`` do not count those for padding."""
        self.shape = shape
        self.num_pages = num_pages
        self.num_requests = num_requests
        self.page_bytes = PAGE * shape.row_bytes
        size = (num_pages + 1, shape.num_kv_heads, PAGE, 2 * shape.head_dim)
        self.data = torch.zeros(shape.num_layers, *size, dtype=shape.dtype, device=shape.device)
        self.layers = self.data.unbind(0)
        columns = min(most_pages or num_pages, num_pages)
        self.table = torch.zeros(num_requests + 1, columns, dtype=torch.int32, device=shape.device)
        self._free_pages = list(range(num_pages, 0, -1))
        self._free_rows = list(range(num_requests, 0, -1))
        self._holders = [0] * (num_pages + 1)
        """How many requests hold each page."""
        self._keepers = [0] * (num_pages + 1)
        """In how many retained lists each page is."""
        self._retained: dict[object, list[int]] = {}
        """The one used longest ago first."""
        self._num_held = 0
        self._released: deque[Holding] = deque()
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

    def retain(self, key: object, pages: Sequence[int]) -> None:
        """Keeps pages that a request holds now, as ``key``."""
        with self._lock:
            self._collect()
            self._forget(key)
            self._retained[key] = list(pages)
            for page in pages:
                self._keepers[page] += 1

    def hold(self, key: object, num_pages: int) -> Holding | None:
        """Holds the first pages that are retained as ``key``, which counts as used now; None if
        they are gone. ``release`` them as those of a request."""
        with self._lock:
            self._collect()
            pages = self._retained.pop(key, None)
            if pages is None:
                return None
            self._retained[key] = pages
            return Holding(SCRATCH, self._add_holder(pages[:num_pages]))

    def forget(self, key: object) -> None:
        """Retains the pages of ``key`` no longer."""
        with self._lock:
            self._collect()
            self._forget(key)

    def is_retained(self, key: object) -> bool:
        return key in self._retained

    def take(self, num_rows: int, shared: Sequence[int] = ()) -> Holding | None:
        """Pages for ``num_rows`` rows. The first of them are ``shared``, which another request
        holds too. None if there are too few pages, or too many requests."""
        needed = max(0, pages_for(num_rows) - len(shared))
        with self._lock:
            self._collect()
            fits = num_rows <= self.most_rows and bool(self._free_rows)
            if not fits or not self._make_room(needed, shared):
                return None
            pages = self._add_holder([*shared, *self._pop(needed)])
            holding = Holding(self._free_rows.pop(), pages)
        self._enter(holding, 0)
        return holding

    def extend(self, holding: Holding, num_rows: int) -> bool:
        """Adds pages until ``num_rows`` rows fit; False if there are too few."""
        known = len(holding.pages)
        with self._lock:
            self._collect()
            needed = pages_for(num_rows) - known
            if num_rows > self.most_rows or not self._make_room(needed):
                return False
            holding.pages += self._add_holder(self._pop(needed))
        self._enter(holding, known)
        return True

    def replace(self, holding: Holding, num_pages: int) -> bool:
        """Copies the first ``num_pages`` pages, which others hold too, into pages of its own; False
        if there are too few."""
        with self._lock:
            self._collect()
            if not self._make_room(num_pages):
                return False
            old, own = holding.pages[:num_pages], self._add_holder(self._pop(num_pages))
            for page in old:
                self._drop(page)
        holding.pages[:num_pages] = own
        self.data[:, own] = self.data[:, old]
        self._enter(holding, 0)
        return True

    def release(self, holding: Holding) -> None:
        """Returns a request's pages. The garbage collector may call this in a thread that holds
        any lock, so it leaves the work to the next call if it cannot have the slab's."""
        self._released.append(holding)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def check_integrity(self) -> list[str]:
        """What is wrong when no request runs: nothing, unless there is a leak."""
        with self._lock:
            self._collect()
            faults = [f"page {page} is held" for page, n in enumerate(self._holders) if n]
            counted = Counter(page for pages in self._retained.values() for page in pages)
            if counted != Counter({page: n for page, n in enumerate(self._keepers) if n}):
                faults.append("pages are retained that nobody asked for")
            if self._num_held != sum(map(bool, self._holders)):
                faults.append(f"{self._num_held} pages are counted as held")
            for name, free, total in (
                ("pages", [*self._free_pages, *counted], self.num_pages),
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

    def _make_room(self, number: int, shared: Sequence[int] = ()) -> bool:
        """Whether so many pages are free, after retained ones have been freed if need be. Those
        that a request is about to share must be held."""
        assert all(self._holders[page] for page in shared)
        if len(self._free_pages) >= number:
            return True
        kept = {page for pages in self._retained.values() for page in pages}
        if len(self._free_pages) + sum(not self._holders[page] for page in kept) < number:
            return False
        while len(self._free_pages) < number:
            self._forget(next(iter(self._retained)))
        return True

    def _forget(self, key: object) -> None:
        for page in reversed(self._retained.pop(key, [])):
            self._keepers[page] -= 1
            self._free_if_unused(page)

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        self._num_held -= not self._holders[page]
        self._free_if_unused(page)

    def _free_if_unused(self, page: int) -> None:
        if not self._holders[page] and not self._keepers[page]:
            self._free_pages.append(page)

    def _collect(self) -> None:
        while self._released:
            holding = self._released.popleft()
            for page in reversed(holding.pages):
                self._drop(page)
            if holding.row != SCRATCH:
                self._free_rows.append(holding.row)

    def _enter(self, holding: Holding, start: int) -> None:
        """Writes pages from number ``start`` on into the table."""
        pages = torch.from_numpy(np.array(holding.pages[start:], np.int32))
        send_into(pages, self.table[holding.row, start : len(holding.pages)])


def pages_for(num_rows: int) -> int:
    return -(-num_rows // PAGE)
