"""What we set out to reach, and whether we did."""

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


def show_goals(console: Console, goals: Sequence[Goal]) -> None:
    for goal in goals:
        mark = {True: "[green]met[/]", False: "[red]not met[/]", None: "not judged"}[goal.met]
        console.print(f"goal, {goal.text}: {mark} ({goal.figure})", highlight=False)
