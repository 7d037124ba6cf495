"""Tables and numbers on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from kvboost.bench.kit.timing import Sample


def table(
    title: str, names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Columns of names, then of numbers; narrow, so that 80 columns hold many."""
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for heading in names:
        made.add_column(heading, no_wrap=True)
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def spread(sample: Sample) -> str:
    """The median, and lowest to highest in brackets."""
    middle, low, high = sample.median_ms, sample.min_ms, sample.max_ms
    digits = 0 if middle >= 10 else 1 if middle >= 1 else 3
    return f"{middle:.{digits}f} [{low:.{digits}f}-{high:.{digits}f}]"


def ms(value: float | Sample) -> str:
    """Milliseconds with as many digits as make sense; of a sample the median."""
    if isinstance(value, Sample):
        value = value.median_ms
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def dim(text: str) -> Text:
    return Text(text, style="dim")


def warning(text: str) -> Text:
    return Text(text, style="yellow")
