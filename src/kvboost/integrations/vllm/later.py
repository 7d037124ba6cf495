"""Requests whose rows are kept later, or not at all.

Keeping rows costs the thread in which vLLM's scheduler and model run. While many requests run and
none of the last ones has loaded anything, requests that end are only remembered: vLLM's prefix
cache has their pages until it needs them for others. They are kept from there when less is to be
done, or when a request loads something again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvboost.integrations.vllm.groups import Tables
from kvboost.integrations.vllm.options import RequestOptions
from kvboost.integrations.vllm.planner import prompt_ids
from kvboost.tokens.hashing import TokenIds

MANY, FEW = 4, 2
"""With as many requests at a time, each millisecond between two steps counts; with as few, there is
time for those that were put off."""
USELESS = 32
"""So many requests have ended since one has loaded something."""
SAMPLE = 32
"""One of so many is kept all the same: otherwise none could ever load anything."""
REMEMBERED = 64
"""Requests; the oldest are dropped first."""


@dataclass(frozen=True)
class Ended:
    """A request that has ended, or of which rows leave a window or states are kept while it runs.
    ``request`` is vLLM's."""

    request: Any
    prompt: TokenIds | None
    """The tokens of its prompt, if they are at hand."""
    asked: RequestOptions
    salt: str
    tables: Tables
    exact_rows: int
    exact_pages: int
    """The first pages, whose hashes are those of exact rows."""
    first: int = 0
    """Rows before it are stored, and need not be in its pages any more."""

    @property
    def hashes(self) -> Sequence[Any]:
        """Of its exact pages, as far as vLLM's prefix cache names them."""
        hashes: Sequence[Any] = self.request.block_hashes[: self.exact_pages]
        return hashes

    def exact_ids(self) -> TokenIds:
        """The tokens of its exact rows."""
        if self.prompt is None:
            return prompt_ids(self.request.all_token_ids[: self.exact_rows])
        rest = prompt_ids(self.request.all_token_ids[len(self.prompt) : self.exact_rows])
        return np.concatenate([self.prompt[: self.exact_rows], rest])


class Later:
    """``is_on``: whether requests may be put off at all. ``page`` is the number of rows in a page.
    ``count`` is told what becomes of those that were."""

    def __init__(self, page: int, count: Callable[[str], None], *, is_on: bool) -> None:
        self._page = page
        self._count = count
        self._is_on = is_on
        self._remembered: dict[Any, Ended] = {}
        """By the hash of the last exact page, which names all rows before it; the newest last."""
        self._useless = 0

    def __len__(self) -> int:
        return len(self._remembered)

    def on_load(self) -> None:
        """A request has loaded something that was kept."""
        self._useless = 0

    def puts_off(self, ended: Ended, num_requests: int) -> bool:
        """Whether a request that has ended is remembered. ``num_requests`` are there with it."""
        self._useless += 1
        hashes = ended.hashes
        is_named = 0 < len(hashes) == ended.exact_rows // self._page
        is_crowded = self._is_on and num_requests >= MANY and self._useless >= USELESS
        if not (is_crowded and is_named) or self._useless % SAMPLE == 0:
            return False
        for page_hash in reversed(hashes):
            if self._remembered.pop(page_hash, None) is not None:
                break  # it was the same conversation, which has gone on
        self._remembered[hashes[-1]] = ended
        if len(self._remembered) > REMEMBERED:
            self._drop(next(iter(self._remembered)))
        return True

    def is_time(self, num_requests: int) -> bool:
        """Whether to take those that were put off, with so many others in vLLM."""
        return bool(self._remembered) and (num_requests <= FEW or self._useless < USELESS)

    def take(self, most_rows: int, find: Callable[[Any], int | None]) -> list[Ended]:
        """The oldest requests that were put off, with ``most_rows`` exact rows or one of them, and
        with the pages that vLLM has for them now; ``find`` gives the page of a hash. Those of which
        it has none are dropped."""
        taken: list[Ended] = []
        for last, ended in list(self._remembered.items()):
            if taken and sum(one.exact_rows for one in taken) + ended.exact_rows > most_rows:
                break
            pages = _found(ended.hashes, find)
            if not pages:
                self._drop(last)
                continue
            del self._remembered[last]
            self._count("kept")
            rows = len(pages) * self._page
            taken.append(replace(ended, tables=(pages,), exact_rows=rows, exact_pages=len(pages)))
        return taken

    def forget(self, salt: str | None = None) -> None:
        """Drops all requests, or those with a salt."""
        for last, ended in list(self._remembered.items()):
            if salt is None or ended.salt == salt:
                self._drop(last)

    def _drop(self, last: Any) -> None:
        del self._remembered[last]
        self._count("dropped")


def _found(hashes: Sequence[Any], find: Callable[[Any], int | None]) -> tuple[int, ...]:
    """The pages of the first hashes, up to one that has none."""
    pages: list[int] = []
    for page_hash in hashes:
        if (page := find(page_hash)) is None:
            break
        pages.append(page)
    return tuple(pages)
