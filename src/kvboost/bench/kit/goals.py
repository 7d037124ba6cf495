"""The goals of benchmarks, and whether they were reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console


@dataclass(frozen=True)
class Goal:
    """Something we want to be true, and whether it is; None if it was not measured."""

    text: str
    met: bool | None
    figure: str


Verdict = tuple[bool | None, str]
"""Whether a goal is met, and the figure."""


def reaches(value: float | None, least: float, form: str = "{:.2f}") -> Verdict:
    """Whether a figure is at least ``least``."""
    return (None, "not measured") if value is None else (value >= least, form.format(value))


def keeps_to(value: float | None, most: float, form: str = "{:.2f}") -> Verdict:
    """Whether a figure is at most ``most``."""
    return (None, "not measured") if value is None else (value <= most, form.format(value))


def judge(
    texts: Sequence[str], verdicts: Sequence[Verdict], unless: str | None = None
) -> list[Goal]:
    """A goal for each text, in order. ``unless`` says why none of them is judged."""
    if unless is not None:
        verdicts = [(None, unless)] * len(texts)
    return [Goal(text, *verdict) for text, verdict in zip(texts, verdicts, strict=True)]


def show_goals(console: Console, goals: Sequence[Goal]) -> None:
    for goal in goals:
        mark = {True: "[green]met[/]", False: "[red]not met[/]", None: "not judged"}[goal.met]
        console.print(f"goal, {goal.text}: {mark} ({goal.figure})", highlight=False)
