"""Long answers, as they are measured, summed up and shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from kvboost.bench.quality.deviation import Settings, measure
from kvboost.bench.quality.long_summary import LongSummary
from kvboost.bench.quality.long_tables import long_figure, long_tables
from kvboost.bench.quality.noise import NoiseFloor
from kvboost.bench.quality.rows import NOISE, NOISE_KINDS, LongAnswer, Row, append_rows, load_rows
from kvboost.bench.quality.summary import Summary, summarize
from kvboost.bench.quality.tasks import Asking, choose
from kvboost.model.loading.load import LoadedModel, wrap
from support.tiny import byte_tokenizer, tiny_model

ASKING = {"passages": 3, "passage_tokens": 160, "answer_tokens": 12}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap(tiny_model("llama", max_position_embeddings=4096), byte_tokenizer())


def row(number: int, donor: str = "header", **changes: object) -> Row:
    """An answer of 40 tokens. The even ones are the same as full prefill's."""
    same = number % 2 == 0
    strategy = NOISE_KINDS[0] if donor == NOISE else "auto"
    made = Row(
        *(f"q{number}", donor, strategy, 0.0 if donor == NOISE else 0.19, 0.2, 0.9),
        *(None if same else 10, None, None, 0.3, 0.25),
        kl_by_token=(0.8, *[0.4] * 7, *[0.1] * 24, *[0.0] * 8),
        no_context_kl=1.0,
        long=LongAnswer("code", 1.0 if same else 0.5, 0.2, same, True, same or None, True),
    )
    return replace(made, **changes)


def summed(rows: list[Row]) -> list[tuple[Summary, LongSummary]]:
    return [(one, one.long) for one in summarize(rows) if one.long is not None]


def test_long_answers_are_summed_up_by_hand() -> None:
    ((one, long),) = summed([row(0), row(1), row(2), row(3)])
    assert (one.f1, one.f1_difference, one.is_within(0.03)) == (None, None, None)
    assert one.same_text == 0.5 and one.gap_kl == pytest.approx(0.8)
    assert long.likeness.mean == 0.75 and long.likeness.count == 4
    assert 0.5 <= long.likeness.low < 0.75 < long.likeness.high <= 1.0
    assert long.agreed_tokens == 25  # 40, 10, 40 and 10
    assert [(low, high) for low, high, _ in long.kl_by_tokens] == [
        (1, 1),
        (2, 8),
        (9, 32),
        (33, 40),
    ]
    means = [kl.mean for *_, kl in long.kl_by_tokens]
    assert means == pytest.approx([0.8, 0.4, 0.1, 0.0])
    assert long.parses is not None and (long.parses.reused, long.parses.full) == (0.5, 1.0)
    assert long.parses.difference.mean == -0.5
    assert long.passes is not None and long.passes.difference.count == 2  # of two nothing is known
    assert long.floor is None


def test_the_floor_is_that_of_the_same_examples() -> None:
    """Full prefill in bfloat16 gives the same answer to 1 and 2; 0 and 3 were not measured."""
    floor = LongAnswer("code", 1.0, 0.2)
    noise = [row(n, NOISE, first_difference=None, kl=0.1, long=floor) for n in (1, 2)]
    found = summed([row(0), row(1), row(2), row(3), *noise])
    (_, long), (own, _) = found
    assert own.donor == NOISE and long.floor is not None
    assert long.floor.count == 2
    assert long.floor.likeness_share == pytest.approx(1.5 / 2)
    assert long.floor.likeness_difference.mean == pytest.approx(-0.25)
    assert long.floor.agreed_share == pytest.approx(50 / 80)
    assert long.floor.kl_ratio == pytest.approx(2.0)


def test_tables_are_80_columns_wide_and_say_what_is_missing() -> None:
    noise = [row(n, NOISE) for n in (0, 1)]
    many = [row(n, strategy="cacheblend") for n in range(3)]
    for rows, warned in (
        ([*many, *noise], ("few examples: 3", "the floor was measured on 2 of 3")),
        (many, ("few examples: 3", "no floor was measured")),
    ):
        console = Console(width=80, record=True)
        console.print(*long_tables(summarize(rows)))
        shown = console.export_text()
        words = " ".join(shown.split())
        assert "code, header: each passage read after the chat template's" in words
        assert "cacheblend 19%" in shown and "(3 examples)" in words and "33–40" in shown
        assert all(one in words for one in warned)
        assert max(map(len, shown.splitlines())) <= 80
        cut_off = [line for line in shown.splitlines() if "… " in line or line.endswith("…")]
        assert not cut_off
        assert ("bfloat16 " in shown.partition("examples)")[2].partition("few")[0]) is (
            rows != many
        )


def test_the_picture_has_the_floor_in_every_panel() -> None:
    rows = [row(0), row(1), row(0, "reordered"), row(1, "reordered"), row(0, NOISE)]
    figure = long_figure(summarize(rows), "x")
    assert [axes.get_title() for axes in figure.axes] == ["code, header", "code, reordered"]
    assert all(len(axes.lines) == 2 for axes in figure.axes)


def test_rows_are_saved_and_tasks_are_not_mixed(tmp_path) -> None:
    question = Row("q", "header", "auto", 0.19, 0.1, 1.0, None, 0.5, 0.5, 0.3, 0.17)
    edit = row(1, question="e", long=LongAnswer("edit", 0.4, 0.1, True, True, False, True))
    rows = [question, row(0), edit]
    append_rows(rows, tmp_path / "rows.jsonl")
    assert load_rows([tmp_path / "rows.jsonl"]) == rows
    found = summarize(rows)
    assert [one.count for one in found] == [1, 1, 1]
    assert [one.long and one.long.task for one in found] == [None, "code", "edit"]


@pytest.mark.parametrize("task", ["summary", "code", "edit"])
def test_every_task_is_measured_over_moved_text(task: str, loaded: LoadedModel) -> None:
    settings = Settings(
        task=task, donors=("header", "reordered"), strategies=("auto", "none"), **ASKING
    )
    chosen = choose(Asking(task=task, limit=2, **{**ASKING, "answer_tokens": 128}))
    sixteen = tiny_model("llama", max_position_embeddings=4096).bfloat16()
    noise = NoiseFloor(wrap(sixteen, byte_tokenizer())) if task == "edit" else None
    if noise is not None:
        settings = replace(settings, noise=True)
    told: list[None] = []
    (rows,) = measure(loaded, chosen[:1], settings, lambda: told.append(None), None, noise)
    assert len(rows) == len(told) == settings.rows_per_question == (4 if noise is None else 5)
    for one in rows:
        assert one.long is not None and one.task == task and one.f1 is None
        assert 0 <= one.long.likeness <= 1 and len(one.kl_by_token) <= 12
        if one.first_difference is None:
            assert one.long.likeness == 1.0
        assert (one.long.parses is None) is (task == "summary")
    assert any(one.kl > 1e-6 for one in rows)
    if noise is not None:
        assert [one.strategy for one in rows if one.donor == NOISE] == ["bfloat16"]
