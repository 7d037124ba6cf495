"""Shows the progress of long work on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from kvboost.config import progress_allowed


class Step:
    """One line of progress."""

    def __init__(self, progress: RichProgress, task: int) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)  # type: ignore[arg-type]


class Progress:
    """A titled list of steps, each with a bar.

    Without a terminal, commands print the title and the steps as plain lines; calls of the library
    (``only_on_terminal``) print nothing. ``KVBOOST_PROGRESS=0`` hides all progress, ``show=False``
    hides this one.
    """

    def __init__(self, title: str, *, only_on_terminal: bool = False, show: bool = True) -> None:
        self._console = Console(file=sys.stderr, quiet=not (show and progress_allowed()))
        if only_on_terminal and not self._console.is_terminal:
            self._console.quiet = True
        self._title = title
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=self._console.quiet or not self._console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._console.print(self._title, highlight=False)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[Step]:
        """A step of ``total`` units; without a total the bar only shows that work is going on."""
        if not self._console.is_terminal:
            self._console.print(f"  {name} ...", highlight=False)
        task = self._progress.add_task(name, total=total)
        yield Step(self._progress, task)
        self._progress.update(task, total=total or 1, completed=total or 1)
