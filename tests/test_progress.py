"""Progress without a terminal: plain lines that say how far the work is."""

from __future__ import annotations

import pytest

from kvboost import progress
from kvboost.progress import Progress


def test_a_file_gets_the_title_the_steps_and_lines_now_and_then(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("three rounds") as shown, shown.step("rounds", 3) as step:
        step.advance()
        step.advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "three rounds",
        "  rounds ...",
        "  rounds: 1 of 3, 0:00",
        "  rounds: 3 of 3, 0:00",
    ]


def test_lines_are_not_printed_at_every_step(capsys) -> None:
    with Progress("many rounds") as shown, shown.step("rounds", 1000) as step:
        for _ in range(1000):
            step.advance()
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("done", "total", "told"), [(3, 8, "3 of 8"), (5e8, 1e9, "50%"), (1, None, "")]
)
def test_large_totals_are_percents(done: float, total: float | None, told: str) -> None:
    assert progress._count(done, total) == told
