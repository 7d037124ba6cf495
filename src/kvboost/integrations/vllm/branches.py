"""Approximate pages in vLLM's prefix cache.

vLLM files a page under a hash that chains the pages before it. From the first approximate row on, a
request's hashes are replaced by others that depend on the repair. So its pages form a branch beside
the exact tree: nothing approximate is ever found as exact, and the next turn of the conversation,
given the same hashes, finds its own pages. This is the only code that touches
``Request.block_hashes``.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

MOST_BRANCHES = 65_536
"""Branches that are remembered; the oldest are forgotten first, and then only hit our own store."""


@dataclass(frozen=True)
class Branch:
    """From page ``first`` on, pages are approximate, repaired as ``repair`` says."""

    first: int
    repair: str


class Branches:
    """Which requests run in branches, and which branches there are. Not thread-safe."""

    def __init__(self) -> None:
        self._of: dict[str, Branch] = {}
        self._exact: dict[str, list[Any]] = {}
        self._known: OrderedDict[tuple[str, bytes], int] = OrderedDict()
        self._firsts: set[int] = set()  # the pages at which branches begin: few

    def __bool__(self) -> bool:
        """Whether there is one that a request could rejoin."""
        return bool(self._known)

    def of(self, request_id: str) -> Branch | None:
        """The branch of a request; None if it is exact."""
        return self._of.get(request_id)

    def enter(self, request_id: str, hashes: list[Any], branch: Branch) -> None:
        """The request's pages from ``branch.first`` on are approximate from now on."""
        if request_id in self._of:
            self.leave(request_id, hashes)
        self._exact[request_id] = list(hashes)
        self._of[request_id] = branch
        if branch.first < len(hashes):
            name = (branch.repair, bytes(hashes[branch.first]))
            self._known[name] = branch.first
            self._known.move_to_end(name)
            if len(self._known) > MOST_BRANCHES:
                self._known.popitem(last=False)
            self._firsts.add(branch.first)
            hashes[branch.first :] = _approximate(hashes[branch.first :], branch.repair)

    def leave(self, request_id: str, hashes: list[Any]) -> None:
        """The request has no approximate row after all and gets its own hashes back. Only for one
        that has not run yet."""
        exact = self._exact.pop(request_id)
        del self._of[request_id]
        hashes[: len(exact)] = exact

    def rejoin(
        self, request_id: str, hashes: list[Any], repair: str, is_cached: Callable[[Any], bool]
    ) -> Branch | None:
        """Enters the branch in which an earlier request with the same beginning ran, the last of
        several, unless the exact page is there too. ``is_cached`` says whether vLLM's prefix cache
        holds a page."""
        for page in sorted((one for one in self._firsts if one < len(hashes)), reverse=True):
            if (repair, bytes(hashes[page])) in self._known:
                (approximate,) = _approximate([hashes[page]], repair)
                if is_cached(hashes[page]) or not is_cached(approximate):
                    return None
                branch = Branch(page, repair)
                self.enter(request_id, hashes, branch)
                return branch
        return None

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._of.pop(request_id, None)
        self._exact.pop(request_id, None)

    def clear(self) -> None:
        """No page is in vLLM's cache any more."""
        self._known.clear()
        self._firsts.clear()


def _approximate(page_hashes: Sequence[Any], repair: str) -> list[Any]:
    """The names of approximate pages, of the same type as the exact ones, which are of one length:
    each differs from its exact one in the same random bits. A digest of each would take longer."""
    size, joined = len(page_hashes[0]), b"".join(page_hashes)
    bits = hashlib.shake_256(b"kvboost approximate\0" + repair.encode()).digest(size)
    flipped = int.from_bytes(joined, "big") ^ int.from_bytes(bits * len(page_hashes), "big")
    names, kind = flipped.to_bytes(len(joined), "big"), type(page_hashes[0])
    return [kind(names[at : at + size]) for at in range(0, len(joined), size)]
