"""Requests whose rows leave a window while they run.

vLLM frees a page of a windowed layer when all of its rows have left the window, and a later step
overwrites it. So what is to be kept of a request is kept while it runs, each time when the next of
its rows may be freed::

    |---- stored ----|------ to be kept ------|------- not computed -------
    0              first                    rows
                     ^ its page may be freed when rows - window reaches the end of that page
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


class Leaving:
    """``window`` is the smallest of the model's, ``page`` the number of rows in a page."""

    def __init__(self, window: int, page: int) -> None:
        self._window = window
        self._page = page
        self._running: dict[str, Running] = {}

    def begin(
        self, request: Any, tables: Sequence[Sequence[int]], rows: int, num_stored: int
    ) -> None:
        """A request is scheduled first, or again after it was preempted. Its first ``rows`` rows
        are in its pages or have left the windows, and the first ``num_stored`` are stored. If some
        are neither stored nor in its pages, nothing more is kept of it."""
        self._running.pop(request.request_id, None)
        if first_row(tables, self._page) <= num_stored:
            self._running[request.request_id] = Running(
                [list(table) for table in tables], rows, num_stored, request.num_preemptions
            )

    def grow(self, request_id: str, tables: Sequence[Sequence[int]] | None, rows: int) -> None:
        """It has got further pages; ``rows`` are computed before the step that is planned."""
        if (one := self._running.get(request_id)) is not None:
            one.rows = rows
            for table, more in zip(one.tables, tables or (), strict=False):
                table += more

    def due(self) -> list[str]:
        """The requests of which vLLM may have freed a page that is not stored."""
        return [
            name
            for name, one in self._running.items()
            if (one.rows - self._window + 1) // self._page > one.first // self._page
        ]

    def of(self, request: Any) -> Running | None:
        """The state of a request; None if nothing more is kept of it. Pages that it had before it
        was preempted are another's now."""
        one = self._running.get(request.request_id)
        return one if one and one.num_preemptions == request.num_preemptions else None

    def end(self, request_id: str) -> None:
        """The request has ended, or nothing more is kept of it."""
        self._running.pop(request_id, None)
