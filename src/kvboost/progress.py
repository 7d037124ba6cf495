"""Progress of long work, on standard error: a bar on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

LINE_SECONDS = 10.0
"""Without a terminal, so many seconds pass between two lines of a step."""
MOST_COUNTED = 100_000
"""A step with more units, bytes for instance, shows percents."""


class Step:
    """One step of the work, of ``total`` units."""

    def __init__(
        self, name: str, total: float | None, progress: RichProgress, console: Console
    ) -> None:
        self._name = name
        self._total = total
        self._progress = progress
        self._console = console
        self._task = progress.add_task(name, total=total)
        self._done = 0.0
        self._start = self._told = time.monotonic()

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)
        self._done += amount
        now = time.monotonic()
        if not self._console.is_terminal and now - self._told >= LINE_SECONDS:
            self._told = now
            told = f"{_count(self._done, self._total)}, {_clock(now - self._start)}"
            self._console.print(f"  {self._name}: {told}", highlight=False)

    def finish(self) -> None:
        self._progress.update(self._task, total=self._total or 1, completed=self._total or 1)


class _Done(ProgressColumn):
    """``3 of 8, 0:12``"""

    def render(self, task: Task) -> Text:
        told = _count(task.completed, task.total), _clock(task.elapsed or 0.0)
        return Text(", ".join(part for part in told if part), style="progress.remaining")


def _count(done: float, total: float | None) -> str:
    if total is None:
        return ""
    return f"{done / total:.0%}" if total > MOST_COUNTED else f"{done:.0f} of {total:.0f}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


class Progress:
    """A titled list of steps. Without a terminal the title and the steps are plain lines."""

    def __init__(self, title: str) -> None:
        self._console = Console(file=sys.stderr)
        self._title = title
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _Done(),
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
        step = Step(name, total, self._progress, self._console)
        yield step
        step.finish()
