"""Requests of which something must be kept while they run: vLLM does not keep it until they end.

**Rows that leave a window.** vLLM frees a page of a windowed layer when all of its rows have left
the window, and a later step overwrites it. So rows are kept each time when the next of them may be
freed::

    |---- stored ----|------ to be kept ------|------- not computed -------
    0              first                    rows
                     ^ its page may be freed when rows - window reaches the end of that page

**States.** A layer with states has those of one row. When a request goes on after the end of a
page, vLLM leaves them in that page's memory and frees it two steps later. So they are kept in the
step that computes the last row of the page, or in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvboost.integrations.vllm.groups import first_row


@dataclass
class Running:
    """A request that runs: its ``tables`` with all pages that it has had since it was scheduled,
    also those that vLLM has freed since, and how many ``rows`` the steps so far compute."""

    tables: list[list[int]]
    rows: int
    first: int
    """Rows from here on are not stored, and are in its pages."""
    num_preemptions: int = 0


class Followed:
    """The requests that run. ``page`` is the number of rows in a page."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._running: dict[str, Running] = {}

    def begin(
        self, request: Any, tables: Sequence[Sequence[int]], rows: int, num_stored: int
    ) -> None:
        """A request is scheduled first, or again after it was preempted. Its first ``rows`` rows
        are in its pages or have left the windows, and the first ``num_stored`` are stored."""
        self._running[request.request_id] = Running(
            [list(table) for table in tables], rows, num_stored, request.num_preemptions
        )

    def grow(self, request_id: str, tables: Sequence[Sequence[int]] | None, rows: int) -> None:
        """It has got further pages; ``rows`` are computed before the step that is planned."""
        if (one := self._running.get(request_id)) is not None:
            one.rows = rows
            if tables is None:  # as in most steps
                return
            for table, more in zip(one.tables, tables, strict=False):
                table += more

    def of(self, request: Any) -> Running | None:
        """The state of a request; None if nothing more is kept of it. Pages that it had before it
        was preempted are another's now."""
        one = self._running.get(request.request_id)
        return one if one and one.num_preemptions == request.num_preemptions else None

    def end(self, request_id: str) -> None:
        """The request has ended, or nothing more is kept of it."""
        self._running.pop(request_id, None)


class Leaving(Followed):
    """Requests whose rows leave a window: the smallest of the model's has ``window`` rows."""

    def __init__(self, window: int, page: int) -> None:
        super().__init__(page)
        self._window = window

    def begin(
        self, request: Any, tables: Sequence[Sequence[int]], rows: int, num_stored: int
    ) -> None:
        """As for others. If some rows are neither stored nor in its pages, nothing more is kept of
        it."""
        self.end(request.request_id)
        if first_row(tables, self._page) <= num_stored:
            super().begin(request, tables, rows, num_stored)

    def due(self) -> list[str]:
        """The requests of which vLLM may have freed a page that is not stored."""
        return [
            name
            for name, one in self._running.items()
            if (one.rows - self._window + 1) // self._page > one.first // self._page
        ]


class PageEnds(Followed):
    """Requests of a model that has states in the groups ``with_states``."""

    def __init__(self, with_states: Sequence[int], page: int) -> None:
        super().__init__(page)
        self._with_states = with_states

    def reached(self, request: Any, num_rows: int, every: int) -> int | None:
        """The row whose states are to be kept in the step that is planned, which computes
        ``num_rows`` of a request; None if there is none. They are there when it is computed. States
        are kept ``every`` so many rows, at the last ends of pages in a prompt, and where vLLM has
        noticed that prompts begin to differ."""
        if (one := self.of(request)) is None:
            return None
        row = self._last_state(one, one.rows + num_rows, request.num_tokens)
        if row <= one.first:
            return None
        end = request.num_prompt_tokens
        # The same prompt again goes on before its last token, and the next turn at its end.
        wanted = ((end - 1) // self._page * self._page, end)
        is_wanted = row in (*wanted, getattr(request, "shared_prefix_boundary", None))
        return row if is_wanted or row - one.first >= every else None

    def _last_state(self, one: Running, end: int, num_tokens: int) -> int:
        """The last row up to ``end`` whose states are in pages when the step is computed that ends
        there; 0 if there is none. Of tokens after ``num_tokens`` it is not known yet which they
        are."""
        row = min(end, num_tokens) // self._page * self._page
        # A page within the step has states only if vLLM has asked its layers to leave some there.
        # The first page of a step has those of the row before the step, until it is at its end.
        is_left = row == end or (row - 1) // self._page > (one.rows - 1) // self._page
        if row > one.rows and is_left and self._has_page(one, row):
            return row
        is_end = one.rows % self._page == 0 and self._has_page(one, one.rows)
        return one.rows if is_end else 0

    def _has_page(self, one: Running, row: int) -> bool:
        """Whether every group with states has a page that ends at ``row``."""
        page = row // self._page - 1
        tables = [one.tables[number] for number in self._with_states]
        return page >= 0 and all(page < len(table) and table[page] for table in tables)
