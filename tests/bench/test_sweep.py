from __future__ import annotations

import random

import pytest

from kvboost.bench.quality import Setting
from kvboost.bench.questions import make_questions
from kvboost.bench.study_plots import plot_sweep, sweep_figure
from kvboost.bench.study_report import sweep_table
from kvboost.bench.sweep import Grid, Kept, Served, measure_sweep, pareto, summarize
from kvboost.errors import ConfigError
from kvboost.model.load import wrap
from tiny import byte_tokenizer, tiny_model


def test_every_setting_serves_every_question() -> None:
    model = wrap(tiny_model("llama", max_position_embeddings=4096), byte_tokenizer())
    grid = Grid(("fixed",), (64,), (16, 4), ("auto", "none"), (0.2, 1.0))
    told: list[None] = []
    served = list(
        measure_sweep(model, make_questions(2), grid, Setting(3, 96, 4), lambda: told.append(None))
    )
    assert len(told) == len(served) == 2 * len(grid) == 2 * 2 * 3
    swept = {(one.kept.bits, one.strategy, one.ratio): one for one in summarize(served)}
    assert all(one.questions == 2 for one in swept.values())
    # Recomputing all of what moved is full prefill, so close that only additions differ.
    assert swept[16, "auto", 1.0].mean_kl < 1e-6 < swept[16, "none", 0.0].mean_kl
    assert swept[16, "none", 0.0].hit_rate > swept[16, "auto", 0.2].hit_rate
    assert swept[16, "none", 0.0].hit_rate > swept[16, "auto", 1.0].hit_rate
    assert swept[4, "none", 0.0].bytes_per_token < swept[16, "none", 0.0].bytes_per_token / 2


@pytest.mark.parametrize("seed", range(5))
def test_nothing_beats_the_front_and_something_beats_the_rest(seed: int) -> None:
    draw = random.Random(seed)
    points = [(draw.randrange(8) / 1.0, draw.randrange(8) / 1.0) for _ in range(25)]
    best = pareto(points)

    def beaten(point: tuple[float, float]) -> bool:
        return any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )

    assert best == {point for point in points if not beaten(point)}


def served(bits: int, strategy: str, ttft: float, kl: float) -> Served:
    return Served(Kept("fixed", 128, bits), strategy, 0.15, ttft, 200.0, 0.8, kl, 1000.0 * bits)


ROWS = [
    served(16, "auto", 100.0, 0.01),
    served(16, "auto", 120.0, 0.03),
    served(4, "auto", 90.0, 0.5),
    served(16, "none", 50.0, 0.2),
]


def test_the_fastest_comes_first_and_the_best_are_marked(tmp_path) -> None:
    swept = summarize(ROWS)
    assert [(one.strategy, one.kept.bits) for one in swept] == [
        ("none", 16),
        ("auto", 4),
        ("auto", 16),
    ]
    assert [one.is_best for one in swept] == [True, False, True]
    assert swept[2].mean_kl == pytest.approx(0.02) and swept[2].over_full == pytest.approx(0.55)
    assert len({one.setting for one in swept}) == 3
    assert sweep_table(swept).row_count == 3
    (axes,) = sweep_figure(swept, title="x").axes
    (front,) = axes.lines
    assert list(front.get_xdata()) == [50.0, 110.0]
    plot_sweep(swept, tmp_path / "sweep.svg", title="x")
    assert (tmp_path / "sweep.svg").read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunkings": ("magic",)}, "chunking='magic'"),
        ({"chunk_sizes": (4,)}, "chunk_size=4 must be"),
        ({"bits": (3,)}, "bits=3 is not available"),
        ({"strategies": ("hope",)}, "strategy='hope'"),
        ({"ratios": (2.0,)}, r"ratio=2\.0 must be"),
    ],
)
def test_a_grid_refuses_what_no_engine_takes(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Grid(**changes)
