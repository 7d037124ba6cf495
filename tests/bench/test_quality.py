from __future__ import annotations

import pytest

from kvboost import ConfigError
from kvboost.bench.quality import (
    DONORS,
    Setting,
    load_rows,
    measure,
    noise_floor,
    pool,
    save_rows,
    summarize,
)
from kvboost.bench.questions import make_questions
from tiny import make_engine, tiny_model

SETTING = Setting(passages=3, passage_tokens=80, answer_tokens=4)
QUESTIONS = make_questions(2, num_passages=3, words_per_passage=60)


def make(**config):
    return make_engine(tiny_model("llama", max_position_embeddings=1024), **config)


@pytest.fixture(scope="module")
def rows():
    with make(reuse_moved="always") as engine:
        yield list(measure(engine, QUESTIONS, ["auto", "none"], [0.2, 1.0], list(DONORS), SETTING))
        assert engine.cache_stats()["hot_chunks"] == 0


def test_every_question_is_served_in_every_way(rows) -> None:
    assert len(rows) == len(QUESTIONS) * len(DONORS) * 3  # no ratio changes what "none" does
    assert {row.donor for row in rows} == set(DONORS)
    for row in rows:
        assert row.kl >= 0 and 0 <= row.top1 <= 1 and row.ttft_ratio > 0
        assert (row.first_difference is None) == (row.top1 == 1)


def test_recomputing_everything_deviates_by_nothing_and_is_charged_in_full(rows) -> None:
    everything = [row for row in rows if row.ratio == 1.0]
    assert everything and all(row.kl < 1e-6 and row.top1 == 1 for row in everything)
    assert all(row.charged_share == pytest.approx(1.0) for row in everything)
    assert all(row.kl > 1e-6 and row.charged_share == 0 for row in rows if row.strategy == "none")


def test_rows_are_saved_loaded_and_summed_up(rows, tmp_path) -> None:
    save_rows(rows[:5], tmp_path / "a.jsonl")
    save_rows(rows[5:], tmp_path / "b.jsonl")
    assert load_rows([tmp_path / "a.jsonl", tmp_path / "b.jsonl"]) == rows
    summaries = summarize(rows)
    assert len(summaries) == len(DONORS) * 3 and all(one.count == 2 for one in summaries)
    pooled = pool(summaries, ["alone", "header"])
    two = [one.mean_kl for one in summaries if one.donor in ("alone", "header")]
    assert pooled["none", 0.0] == pytest.approx((two[2] + two[5]) / 2)
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        load_rows([tmp_path / "bad.jsonl"])


def test_the_same_model_has_no_noise() -> None:
    with make() as engine, make() as twin:
        floor = noise_floor(engine, twin, QUESTIONS[:1], SETTING)
    assert floor["mean_kl"] == pytest.approx(0.0, abs=1e-9) and floor["same_text"] == 1
