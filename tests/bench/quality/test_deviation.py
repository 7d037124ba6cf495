from __future__ import annotations

import pytest
from rich.console import Console

from kvboost import ConfigError
from kvboost.bench.kit.benchmark import Bench
from kvboost.bench.quality.deviation import Settings, measure, run
from kvboost.bench.quality.noise import NOISE_KINDS
from kvboost.bench.quality.rows import EXACT, Row, append_rows, load_rows
from kvboost.bench.quality.summary import quality_tables, summarize
from kvboost.bench.texts.questions import make_questions
from kvboost.model.loading.load import LoadedModel, wrap
from support.tiny import byte_tokenizer, tiny_model

ASKING = {"passages": 3, "passage_tokens": 80, "answer_tokens": 4}
MOVED = ["header", "reordered", "other"]
QUESTIONS = make_questions(2, num_passages=3, words_per_passage=60)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap(tiny_model("llama", max_position_embeddings=4096), byte_tokenizer())


@pytest.fixture(scope="module")
def rows(loaded: LoadedModel) -> list[Row]:
    settings = Settings(
        strategies=("auto", "random", "none"), ratios=(0.2, 1.0), donors=tuple(MOVED), **ASKING
    )
    told: list[None] = []
    parts = list(measure(loaded, QUESTIONS, settings, lambda: told.append(None)))
    assert len(parts) == len(QUESTIONS)
    assert len(told) == sum(map(len, parts)) == len(QUESTIONS) * settings.rows_per_question
    return [row for some in parts for row in some]


def test_every_question_is_served_in_every_way(rows) -> None:
    assert len(rows) == len(QUESTIONS) * len(MOVED) * 5  # no ratio changes what "none" does
    assert {row.donor for row in rows} == set(MOVED)
    for row in rows:
        assert row.kl >= 0 and 0 <= row.top1 <= 1 and row.ttft_ratio > 0
        assert 0 <= row.hit_rate < 1 and row.bytes_per_token > 0
        assert (row.first_difference is None) == (row.top1 == 1)
        assert row.kl == pytest.approx(sum(row.kl_by_token) / len(row.kl_by_token))
        assert row.no_context_kl is not None and row.no_context_kl > 0
        assert row.long is None and row.f1 is not None


def test_every_edit_is_served_from_an_earlier_version_of_the_prompt(loaded) -> None:
    edits = ("edit", "cleared", "dropped", "tools", "added", "compacted", "session")
    settings = Settings(strategies=("auto",), ratios=(0.2,), donors=(*edits, "healed"), **ASKING)
    (found,) = measure(loaded, QUESTIONS[:1], settings, lambda: None)
    by_donor = {row.donor: row for row in found}
    assert set(by_donor) == {*edits, "healed"}
    assert all(row.hit_rate > 0 for row in found), found
    assert by_donor["edit"].charged_share < by_donor["compacted"].charged_share


def test_recomputing_everything_deviates_by_nothing_and_is_charged_in_full(rows) -> None:
    everything = [row for row in rows if row.ratio == 1.0]
    assert everything and all(row.kl < 1e-6 and row.top1 == 1 for row in everything)
    assert all(row.charged_share == pytest.approx(1.0) for row in everything)
    assert all(row.charged_flops == pytest.approx(1.0, abs=0.01) for row in everything)
    # The first passage is an exact hit after the header, and in no other order.
    share = {row.donor: row.recomputed_layer_tokens / row.dense_layer_tokens for row in everything}
    assert 0.5 < share["header"] < 0.8 and 0.9 < share["reordered"] <= 1
    assert all(row.kl > 1e-6 and row.charged_share == 0 for row in rows if row.strategy == "none")


def test_fewer_bits_deviate_more_and_sixteen_not_at_all(loaded: LoadedModel) -> None:
    settings = Settings(
        donors=(EXACT, "header"),
        strategies=("auto",),
        bits=(16, 8, 4),
        **{**ASKING, "passage_tokens": 128, "answer_tokens": 6},
    )
    parts = measure(loaded, make_questions(2), settings)
    found = summarize(row for some in parts for row in some)
    kl = {(one.kept, one.donor): one.mean_kl for one in found}
    eight, four = "8 bits", "4 bits"
    assert kl["16 bits", EXACT] < 1e-6 < kl[eight, EXACT] < kl[four, EXACT]
    assert kl["16 bits", "header"] > 1e-4  # moved text is an approximation
    size = {one.kept: one.bytes_per_token for one in found}
    assert size[four] < size[eight] < size["16 bits"]
    shown = list(quality_tables(found, 0.03))
    assert len(shown) == 18  # three per donor kind and way of keeping


def test_the_control_gets_the_rows_that_auto_has_paid_for(rows) -> None:
    paid = {row.key[:3]: row for row in rows if row.strategy == "auto" and row.ratio == 0.2}
    controls = [row for row in rows if row.strategy == "random" and row.ratio == 0.2]
    assert len(controls) == len(paid)
    for row in controls:
        assert abs(row.charged_share - min(1, paid[row.key[:3]].charged_share)) < 0.01


def test_rows_are_saved_loaded_and_summed_up(rows, tmp_path) -> None:
    append_rows(rows[:5], tmp_path / "rows-a.jsonl")
    append_rows(rows[3:7], tmp_path / "rows-b.jsonl")  # two rows are in both
    append_rows(rows[7:], tmp_path / "rows-b.jsonl")
    assert load_rows([tmp_path / "rows-*.jsonl"]) == rows
    summaries = summarize(rows)
    assert len(summaries) == len(MOVED) * 5 and all(one.count == 2 for one in summaries)
    assert summaries[0].kl_by_token and 0 < summaries[0].gap_kl <= 1
    for path, match in (("bad.jsonl", r"bad\.jsonl"), ("no-*.jsonl", "matches no file")):
        (tmp_path / "bad.jsonl").write_text("{}\n")
        with pytest.raises(ConfigError, match=match):
            load_rows([tmp_path / path])


def test_an_interrupted_run_goes_on_where_it_was(
    loaded: LoadedModel, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the noise floor, which is that of 16 bits here too."""
    monkeypatch.setattr(Bench, "load_model", lambda self: loaded)
    sixteen = tiny_model("llama", max_position_embeddings=4096).bfloat16()
    monkeypatch.setattr(
        "kvboost.bench.quality.deviation.load", lambda *_, **__: wrap(sixteen, byte_tokenizer())
    )
    path = tmp_path / "rows.jsonl"
    settings = Settings(
        limit=2,
        donors=("header",),
        strategies=("auto",),
        ratios=(0.4, 0.8),
        noise=True,
        save=str(path),
        **ASKING,
    )
    bench = Bench(Console(quiet=True), settings)
    run(settings, bench)
    lines = path.read_text().splitlines()
    assert len(lines) == 2 * settings.rows_per_question == 8
    path.write_text("\n".join(lines[:4]) + "\n" + lines[4][:40])  # killed while it wrote
    report = run(settings, bench)
    again = path.read_text().splitlines()
    assert again[:4] == lines[:4] and len(again) == 8
    summaries = report.figures["summaries"]
    assert all(one["count"] == 2 for one in summaries) and len(summaries) == 4
    found = {one["strategy"]: one for one in summaries}
    assert {"auto", *NOISE_KINDS} == found.keys()
    assert found[NOISE_KINDS[0]]["mean_kl"] > 0


def test_the_gap_and_the_margin_are_those_of_the_answers() -> None:
    rows = [
        Row(
            *(f"q{n}", "header", "auto", 0.15, 0.1, 1.0, None, f1, 0.8, 0.3, 0.17),
            no_context_f1=0.2,
            no_context_kl=0.4,
        )
        for n, f1 in enumerate((0.8, 0.5))
    ]
    (one,) = summarize(rows)
    assert one.gap_f1 == pytest.approx((0.65 - 0.2) / 0.6) and one.gap_kl == pytest.approx(0.75)
    assert one.answered == 2 and one.answered_f1 == pytest.approx(0.65)
    assert one.is_within(0.31) and not one.is_within(0.3)
