"""Which moved rows strategies choose, given what the prompt's last rows attend to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvboost.cache.lookup.hits import Hit, MovedRun
from kvboost.config import RepairParams
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.repair import (
    EARLY_SHARE,
    LEAST_BUDGET,
    LEAST_PROBE_ROWS,
    MOST_BUDGET,
    PROBE_ROWS,
    STRATEGIES,
    TYPICAL_ERROR,
    TYPICAL_SHARE,
    MovedText,
    mean_error,
    probe_rows,
    probed_layers,
)
from support.chunks import make_chunk

LAYERS, PROMPT, MOVED = 10, 130, range(10, 110)
DEPTH = len(probed_layers(LAYERS).late)


@dataclass
class Planned:
    moved: tuple[MovedRun, ...]
    num_tokens: int = PROMPT
    num_moved: int = len(MOVED)

    def computed(self) -> list[range]:
        return [range(MOVED.stop, PROMPT)]


def run(start: int, end: int, resemblance: float) -> MovedRun:
    chunk = make_chunk(range(start, end), position=500 + start)
    return MovedRun((Hit(chunk.info, start, end - start, tier="ram"),), resemblance)


def moved_rows(
    see: Callable[[torch.Tensor], None], resemblance: tuple[float, float] = (0.0, 0.0)
) -> MovedText:
    """Two runs of 50 rows; ``see`` writes the attention, ``[2, kinds, rows]``, that a probe finds
    in the early layer and in late ones."""

    plan = Planned((run(10, 60, resemblance[0]), run(60, 110, resemblance[1])))
    moved = MovedText(plan, PROMPT, LAYERS)
    probe = moved.probe_attention()
    assert isinstance(probe.probe, AttentionMass) and probe.positions[-1] == PROMPT - 1
    see(probe.probe.mass)
    return moved


def chosen(moved: MovedText, strategy: str, ratio: float) -> list[int]:
    rows = STRATEGIES[strategy](moved, RepairParams(strategy, ratio)).rows
    return np.flatnonzero(rows).tolist()


def test_the_end_of_the_prompt_counts_as_much_as_all_its_last_rows() -> None:
    def see(mass: torch.Tensor) -> None:
        late = mass[1]
        late[0, 20], late[0, 30], late[0, 40], late[0, 5] = 6.0, 3.0, 1.0, 90.0  # 5 is not moved
        late[1, 40], late[1, 50] = 0.3, 0.1

    moved = moved_rows(see)
    scores = moved.attention()
    assert float(scores.sum()) == pytest.approx(1 - EARLY_SHARE)
    expected = [0.3, 0.15, 0.425, 0.125]
    assert (scores[[20, 30, 40, 50]] / (1 - EARLY_SHARE)).tolist() == pytest.approx(expected)
    assert chosen(moved, "query", 0.02) == [20, 40]


def test_rows_that_an_early_layer_attends_to_are_recomputed_too() -> None:
    def see(mass: torch.Tensor) -> None:
        mass[1, :2, MOVED.start : MOVED.stop] = torch.linspace(2, 1, 100)
        mass[0, :2, [70, 90]] = 1.0

    moved = moved_rows(see)
    assert float(moved.attention().sum()) == pytest.approx(1.0)
    assert moved.attention()[70] > EARLY_SHARE / 2
    assert chosen(moved, "query", 0.05) == [10, 11, 12, 70, 90]


@pytest.mark.parametrize(
    ("share", "times"),
    [(0.05, LEAST_BUDGET), (TYPICAL_SHARE, 1.0), (1.2 * TYPICAL_SHARE, 1.2), (1.0, MOST_BUDGET)],
)
def test_auto_repairs_more_where_the_last_row_attends_more_to_moved_text(
    share: float, times: float
) -> None:
    def see(mass: torch.Tensor) -> None:
        mass[1, :2, MOVED.start : MOVED.stop] = torch.rand(100)
        last = mass[1, 2]
        last[0], last[30] = 0.36 * DEPTH, 0.8 * share * DEPTH  # 0.8 = (1 - 0.36) ** 0.5

    moved = moved_rows(see)
    seen = float((moved.attention() * moved.errors()).sum())
    assert seen > TYPICAL_ERROR  # so that nothing is saved for that
    assert moved.last_share() == pytest.approx(share)
    assert len(chosen(moved, "auto", 0.2)) == round(20 * times)
    assert len(chosen(moved, "query", 0.2)) == 20
    assert len(chosen(moved, "auto", 1.0)) == 100


def test_a_model_that_computes_nan_is_repaired_all_the_same() -> None:
    moved = moved_rows(lambda mass: mass.fill_(math.nan))
    assert 0 < len(chosen(moved, "auto", 0.2)) < 100
    assert len(chosen(moved, "query", 0.2)) == 20


def test_seams_of_runs_that_were_read_after_the_same_text_are_recomputed() -> None:
    def see(mass: torch.Tensor) -> None:
        mass[..., 20:30] = torch.arange(10, 0, -1)

    assert chosen(moved_rows(see), "query", 0.05) == [20, 21, 22, 23, 24]
    after_some = moved_rows(see, (0.0, 0.3))
    assert chosen(after_some, "query", 0.05) == [20, 21, 22, 60, 61]


def even(mass: torch.Tensor) -> None:
    """All moved rows are attended to alike, the last row to as many of them as is typical."""
    mass[..., MOVED.start : MOVED.stop] = 1.0
    mass[1, 2, MOVED.start : MOVED.stop] = TYPICAL_SHARE * DEPTH / len(MOVED)


def test_auto_repairs_less_where_little_has_changed_before_the_rows() -> None:
    numbers = [len(chosen(moved_rows(even, (same, same)), "auto", 0.5)) for same in (0, 0.9, 1)]
    assert numbers[0] == 50 > numbers[1] > numbers[2] > 0


def test_fewer_rows_are_probed_where_little_has_changed() -> None:
    changed, alike = (run(0, 100, resemblance) for resemblance in (0.0, 1.0))
    assert probe_rows([changed]) == PROBE_ROWS
    assert probe_rows([alike]) == LEAST_PROBE_ROWS
    assert LEAST_PROBE_ROWS < probe_rows([MovedRun(changed.hits, 0.6)]) < PROBE_ROWS


def test_rows_behind_a_seam_are_repaired_first() -> None:
    moved = moved_rows(even, (1.0, 1.0))
    errors = moved.errors()
    assert (np.diff(errors[10:60]) < 0).all() and errors[60] == errors[10] > 3 * errors[59]
    rows = chosen(moved, "auto", 0.2)
    first, second = ([row for row in rows if row in part] for part in (range(60), range(60, 110)))
    assert abs(len(first) - len(second)) <= 1
    assert first == [*range(10, 10 + len(first))] and second == [*range(60, 60 + len(second))]


@pytest.mark.parametrize("same", [0.0, 0.7, 1.0])
def test_the_mean_error_of_runs_is_that_of_their_rows(same: float) -> None:
    moved = moved_rows(even, (same, 0.5))
    rows = slice(MOVED.start, MOVED.stop)
    assert mean_error(moved.runs) == pytest.approx(float(moved.errors()[rows].mean()), rel=0.1)


def test_a_part_of_a_run_follows_the_rows_that_are_cut_off() -> None:
    whole = run(10, 60, 0.5)
    part = whole.clip(40, 50)
    assert whole.rows_before == 510 and part.rows_before == 540
    assert part.rows_changed == pytest.approx(whole.rows_changed)
    assert whole.clip(0, 30).resemblance == 0.5
