from __future__ import annotations

import pytest
from rich.console import Console

from kvboost import ConfigError
from kvboost.bench.quality.deviation import (
    DONORS,
    EXACT,
    Row,
    Settings,
    Summary,
    load_rows,
    measure,
    pool,
    quality_figure,
    quality_tables,
    save_rows,
    summarize,
)
from kvboost.bench.texts.questions import make_questions
from kvboost.model.load import LoadedModel, wrap
from tiny import byte_tokenizer, tiny_model

ASKING = {"passages": 3, "passage_tokens": 80, "answer_tokens": 4}
MOVED = [donor for donor in DONORS if donor != EXACT]
QUESTIONS = make_questions(2, num_passages=3, words_per_passage=60)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap(tiny_model("llama", max_position_embeddings=4096), byte_tokenizer())


@pytest.fixture(scope="module")
def rows(loaded: LoadedModel) -> list[Row]:
    settings = Settings(strategies=("auto", "none"), ratios=(0.2, 1.0), **ASKING)
    told: list[None] = []
    found = list(measure(loaded, QUESTIONS, settings, lambda: told.append(None)))
    assert len(told) == len(found)
    return found


def test_every_question_is_served_in_every_way(rows) -> None:
    assert len(rows) == len(QUESTIONS) * len(MOVED) * 3  # no ratio changes what "none" does
    assert {row.donor for row in rows} == set(MOVED)
    for row in rows:
        assert row.kl >= 0 and 0 <= row.top1 <= 1 and row.ttft_ratio > 0
        assert 0 <= row.hit_rate < 1 and row.bytes_per_token > 0
        assert (row.first_difference is None) == (row.top1 == 1)


def test_recomputing_everything_deviates_by_nothing_and_is_charged_in_full(rows) -> None:
    everything = [row for row in rows if row.ratio == 1.0]
    assert everything and all(row.kl < 1e-6 and row.top1 == 1 for row in everything)
    assert all(row.charged_share == pytest.approx(1.0) for row in everything)
    assert all(row.kl > 1e-6 and row.charged_share == 0 for row in rows if row.strategy == "none")


def test_less_is_computed_without_repair(rows) -> None:
    rates = {(one.donor, one.strategy, one.ratio): one.hit_rate for one in summarize(rows)}
    assert rates["header", "none", 0.0] > rates["header", "auto", 0.2]


def test_fewer_bits_deviate_more_and_sixteen_not_at_all(loaded: LoadedModel) -> None:
    settings = Settings(
        donors=(EXACT, "header"),
        strategies=("auto",),
        chunk_sizes=(64,),
        bits=(16, 8, 4),
        **{**ASKING, "passage_tokens": 128, "answer_tokens": 6},
    )
    found = summarize(measure(loaded, make_questions(2), settings))
    kl = {(one.kept, one.donor): one.mean_kl for one in found}
    eight, four = "fixed 64, 8 bits", "fixed 64, 4 bits"
    assert kl["fixed 64, 16 bits", EXACT] < 1e-6 < kl[eight, EXACT] < kl[four, EXACT]
    assert kl["fixed 64, 16 bits", "header"] > 1e-4  # moved text is an approximation
    size = {one.kept: one.bytes_per_token for one in found}
    assert size[four] < size[eight] < size["fixed 64, 16 bits"]
    assert len(list(quality_tables(found))) == 6  # per donor kind and way of keeping


def test_rows_are_saved_loaded_and_summed_up(rows, tmp_path) -> None:
    save_rows(rows[:5], tmp_path / "a.jsonl")
    save_rows(rows[5:], tmp_path / "b.jsonl")
    assert load_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == rows
    summaries = summarize(rows)
    assert len(summaries) == len(MOVED) * 3 and all(one.count == 2 for one in summaries)
    pooled = pool(summaries, ["alone", "header"])
    two = [one.mean_kl for one in summaries if one.donor in ("alone", "header")]
    assert pooled["none", 0.0] == pytest.approx((two[2] + two[5]) / 2)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        load_rows([tmp_path / "bad.jsonl"])


def summary() -> Summary:
    rows = [
        Row("q", "header", "auto", 0.15, kl, 1.0 - kl, first, 0.5, 0.4, 0.3, 0.17)
        for kl, first in ((0.1, None), (0.3, 4))
    ]
    (found,) = summarize(rows)
    return found


def test_quality_is_shown_by_donor_strategy_and_ratio() -> None:
    one = summary()
    assert (one.mean_kl, one.same_text, one.first_difference) == (0.2, 0.5, 4)
    console = Console(width=80, record=True)
    console.print(*quality_tables([one]))
    shown = console.export_text()
    for part in ("after the chat template's header (2 questions)", "15%", "17.0%", "0.2000"):
        assert part in shown
    assert "…" not in shown.replace("…+", "")  # nothing is cut off


def test_the_picture_has_a_panel_per_donor() -> None:
    (axes,) = quality_figure([summary()], "x").axes
    assert axes.get_title() == "header" and len(axes.lines) == 1
