"""Progress of long work, on standard error, and only where someone is looking."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress


class Step:
    """One line of progress."""

    def __init__(self, progress: RichProgress, task: int) -> None:
        self._progress = progress
        self._task = task

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)  # type: ignore[arg-type]


class Progress:
    """A titled list of steps. Without a terminal the title and the steps are plain lines."""

    def __init__(self, title: str) -> None:
        self._console = Console(file=sys.stderr)
        self._title = title
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> Progress:
        self._console.print(self._title, highlight=False)
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    @contextmanager
    def step(self, name: str, total: float | None = None) -> Iterator[Step]:
        """A step of ``total`` units; without a total the bar only shows that work goes on."""
        if not self._console.is_terminal:
            self._console.print(f"  {name} ...", highlight=False)
        task = self._progress.add_task(name, total=total)
        yield Step(self._progress, task)
        self._progress.update(task, total=total or 1, completed=total or 1)
