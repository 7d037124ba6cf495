"""Chunks in pages of the slab: the end of a request hands its pages over, and the beginning of
another refers to them. Nothing is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN, KVData, NewRows, plain
from kvboost.model.execution.kv import RequestKV
from kvboost.model.paged.kv import SharedPages
from kvboost.model.paged.slab import PAGE, KeptPages, Slab, pages_for
from kvboost.model.triton.host import to_device


class PagedData(KVData):
    """The rows of a chunk in pages, which are kept for as long as this object lives. Its first row
    is row ``first`` of the first page."""

    in_pages = True

    def __init__(self, kept: KeptPages, first: int, num_rows: int, *, is_whole: bool) -> None:
        """``is_whole``: whether the rows of the first page before ``first`` are those before the
        chunk."""
        for name, value in {
            "bits": 16,
            "kept": kept,
            "first": first,
            "num_rows": num_rows,
            "is_whole": is_whole,
        }.items():
            object.__setattr__(self, name, value)

    kept: KeptPages
    first: int
    num_rows: int
    is_whole: bool

    @property
    def num_tokens(self) -> int:
        return self.num_rows

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.kept.slab.shape.row_bytes

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """A copy of the rows."""
        (copy,) = self.gather([self])
        return copy.tensors

    @staticmethod
    def gather(several: Sequence[KVData]) -> list[KVData]:
        """Copies outside of the pages, which all are of one slab. Each has memory of its own."""
        paged = [one for one in map(in_pages, several) if one is not None]
        slab = paged[0].kept.slab
        numbers = [page for one in paged for page in one.kept.pages]
        pages = to_device(numbers, torch.int64, slab.shape.device)
        found = slab.data.index_select(1, pages).unflatten(-1, (slab.shape.sides, -1))
        rows = found.permute(4, 0, 2, 1, 3, 5).flatten(3, 4)
        sizes = [len(one.kept.pages) * PAGE for one in paged]
        return [
            plain(some.narrow(3, one.first, one.num_rows).contiguous())
            for one, some in zip(paged, rows.split(sizes, 3), strict=True)
        ]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVData:
        (copy,) = self.gather([self])
        return copy.map(change)

    def pieces(self, offset: int, num_rows: int) -> list[tuple[int, int, int]]:
        """Rows ``[offset, offset + num_rows)``, page by page: the page, the first of its rows, and
        how many."""
        pages = self.kept.pages
        row, end = self.first + offset, self.first + offset + num_rows
        found = []
        while row < end:
            number, start = divmod(row, PAGE)
            count = min(PAGE - start, end - row)
            found.append((pages[number], start, count))
            row += count
        return found


def in_pages(data: KVData) -> PagedData | None:
    """The same rows as what knows their pages; None if they are tensors."""
    return cast(PagedData, data) if data.in_pages else None


class PageStore:
    """Keeps rows in pages of a slab: those of a request, and those that come from elsewhere."""

    def __init__(self, slab: Slab) -> None:
        self._slab = slab

    def pack(self, kv: RequestKV, parts: Sequence[NewRows]) -> list[KVData]:
        """Parts of a request's rows, as chunks. They stay where they are."""
        pages = kv.holding.pages
        lists = [pages[part.start // PAGE : pages_for(part.end)] for part in parts]
        return [
            PagedData(kept, part.start % PAGE, part.end - part.start, is_whole=True)
            for kept, part in zip(self._slab.keep(lists), parts, strict=True)
        ]

    @property
    def num_free(self) -> int:
        """The number of pages that nobody holds."""
        return self._slab.num_free

    def has_room(self, num_rows: int, position: int) -> bool:
        """Whether pages are free for so many rows from ``position`` on."""
        return self.num_free >= pages_for(position % PAGE + num_rows)

    def bring(self, data: KVData, position: int) -> KVData | None:
        """A copy of ``data``, in full precision, in pages; None if too few are free. Rows have the
        place in a page that they would have at ``position`` of a request."""
        first, num_rows = position % PAGE, data.num_tokens
        kept = self._slab.keep_free(pages_for(first + num_rows))
        if kept is None:
            return None
        made = PagedData(kept, first, num_rows, is_whole=first == 0)
        rows = data.tensors[PLAIN].to(self._slab.shape.device, non_blocking=True)
        done = 0
        for page, start, count in made.pieces(0, num_rows):
            there = self._slab.rows(page)[:, :, :, start : start + count]
            there.copy_(rows[:, :, :, done : done + count])
            done += count
        return made

    def prefix(
        self, hits: Sequence[Hit], stored: Sequence[KVData], most_rows: int
    ) -> SharedPages | None:
        """Whole pages of ``stored``, the chunks of the first ``hits`` of a prompt, for at most
        ``most_rows`` rows from its first one on; None if they fill no page."""
        pages: list[int] = []
        for hit, data in zip(hits, stored, strict=False):
            paged = in_pages(data)
            if paged is None or (hit.start % PAGE and not paged.is_whole):
                break
            num_whole = min(hit.end, most_rows) // PAGE
            pages += paged.kept.pages[: max(0, num_whole - hit.start // PAGE)]
        return SharedPages(pages, stored) if pages else None
