"""Moved text on real weights."""

from __future__ import annotations

from kvboost.bench.quality.deviation import Settings, measure
from kvboost.bench.quality.summary import summarize
from kvboost.bench.texts.questions import make_questions


def test_repair_brings_real_answers_closer_and_full_repair_all_the_way(smollm) -> None:
    questions = make_questions(1, seed=3, num_passages=4, words_per_passage=60)
    settings = Settings(
        passages=4,
        passage_tokens=80,
        answer_tokens=2,
        strategies=("query", "none"),
        ratios=(0.2, 1.0),
        donors=("header",),
    )
    rows = [row for some in measure(smollm.model, questions, settings) for row in some]
    by_cell = {(one.strategy, one.ratio): one for one in summarize(rows)}
    assert by_cell["query", 0.2].mean_kl < 0.5 * by_cell["none", 0.0].mean_kl
    assert by_cell["query", 1.0].mean_kl < 1e-6
    assert 0.2 < by_cell["query", 0.2].charged_share < 0.3
