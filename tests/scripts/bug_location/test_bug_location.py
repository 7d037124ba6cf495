from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

import bug_location
from bug_location import (
    BASELINE,
    MODES,
    BugAnswer,
    BugRow,
    Settings,
    bug_table,
    judge,
    load_rows,
    measure_bugs,
    summarize,
    wilson,
)
from kvboost import KVBoost
from kvboost.bench.kit.benchmark import Benchmark
from kvboost.errors import ConfigError
from tiny import make_engine, tiny_model

BENCHMARK = Benchmark("bug-location", "?", "bug_location")
SETTINGS = Settings(questions=2, files=2, pool=3)
PREFIX, CHUNKS = "prefix_cache", "chunk_kv_reuse"


def test_every_mode_answers_and_reuses_what_its_name_says() -> None:
    told: list[None] = []
    with make_engine(
        tiny_model("llama", max_position_embeddings=8192), chunk_size=64, reuse_moved="always"
    ) as engine:
        questions = SETTINGS.make()
        rows = list(measure_bugs(engine, SETTINGS, questions, "run", lambda: told.append(None)))
        kept = engine.cache_stats()["hot_chunks"]
        again = list(measure_bugs(engine, SETTINGS, questions[1:], "run"))
        assert engine.cache_stats()["hot_chunks"] == kept  # requests keep nothing
    assert len(rows) == 2 and len(told) == 2 * len(MODES)
    for row, question in zip(rows, questions, strict=True):
        assert list(row.answers) == list(MODES) and row.right == question.answer
        assert row.answers[BASELINE].not_computed == 0
        assert row.answers[CHUNKS].not_computed > 0.4
        assert row.answers[CHUNKS].not_computed >= row.answers[PREFIX].not_computed
        # Exact reuse gives the answer of no reuse; moved text comes close.
        exact, full, moved = (
            torch.tensor(row.answers[mode].logprobs) for mode in (PREFIX, BASELINE, CHUNKS)
        )
        assert torch.allclose(exact, full, atol=1e-3)
        assert not torch.equal(moved, full)
        assert row.answers[BASELINE].chosen == int(full.argmax())
    # A question's outcome does not depend on earlier ones.
    first, second = (one.answers[CHUNKS].logprobs for one in (rows[1], again[0]))
    assert first == pytest.approx(second, abs=1e-4)


def row(key: str, right: int, *chosen: int) -> BugRow:
    answers = {
        mode: BugAnswer(one, [0.0] * 4, 100.0 + at, 0.5)
        for at, (mode, one) in enumerate(zip(MODES, chosen, strict=True))
    }
    return BugRow("run", key, "heapq", "f", "logic", 900, right, answers)


ROWS = [row("a", 0, 0, 0, 0), row("b", 1, 1, 1, 2), row("c", 2, 3, 3, 2), row("d", 3, 0, 0, 0)]


def test_modes_are_compared_question_by_question(capsys) -> None:
    baseline, prefix, chunks = summarize(ROWS)
    assert baseline.accuracy == prefix.accuracy == chunks.accuracy == 0.5
    assert (baseline.same_answer, prefix.same_answer, chunks.same_answer) == (1, 1, 0.5)
    assert prefix.difference_interval == (0, 0)  # the same answers leave no doubt
    low, high = chunks.difference_interval
    assert low < 0 < high  # one lost and one won: it is unclear
    assert chunks.interval[0] < 0.5 < chunks.interval[1]
    Console(width=80).print(bug_table([baseline, prefix, chunks]))
    shown = capsys.readouterr().out
    assert "4 questions, chance 25%" in shown and "50.0%" in shown and "…" in shown


def test_two_hundred_questions_say_whether_reuse_costs_a_point() -> None:
    right, wrong = row("a", 0, 0, 0, 0), row("b", 0, 0, 0, 1)
    (*_, close), (*_, off) = (
        summarize([right] * 199 + [wrong]),
        summarize([right] * 97 + [wrong] * 3),
    )
    assert judge(close).met is True
    assert judge(off).met is None
    assert judge(summarize([right] * 194 + [wrong] * 6)[-1]).met is False


def test_rows_survive_a_file_and_a_line_cut_off_does_not_count(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(asdict(one)) for one in ROWS]
    path.write_text("\n".join(lines[:2]) + "\n" + lines[2][:30])
    assert load_rows(path) == ROWS[:2]
    assert load_rows(tmp_path / "none.jsonl") == []
    path.write_text('{"question": 1}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl' holds no rows"):
        load_rows(path)


def test_a_run_continues_where_another_ended(tmp_path, monkeypatch, capsys) -> None:
    asked: list[list[int]] = []

    def answer(engine, settings, questions, run, on_answer):
        asked.append([question.number for question in questions])
        for question in questions:
            answers = row("", question.answer, *([question.answer] * 3)).answers
            yield BugRow(run, question.key, "heapq", "f", "logic", 9, question.answer, answers)

    def engine(*_: object, **__: object):
        return make_engine(tiny_model("llama"))

    monkeypatch.setattr(bug_location, "measure_bugs", answer)
    monkeypatch.setattr(KVBoost, "from_pretrained", engine)
    rows = tmp_path / "rows.jsonl"

    def run(questions: int, part: str = "1/1", model: str = "small"):
        settings = Settings(
            model=model, questions=questions, files=2, pool=3, rows=str(rows), part=part
        )
        report = BENCHMARK.perform(settings, Console(width=200))
        return [one["count"] for one in report["summaries"]], report

    assert run(2)[0] == [2, 2, 2]
    counts, report = run(5)
    assert "2 questions are answered" in capsys.readouterr().out
    assert counts == [5, 5, 5] and report["chance"] == 0.25
    (goal,) = report["goals"]
    assert goal["met"] is None and "+0.0 points" in goal["figure"]  # five questions prove nothing
    assert run(5, part="2/2")[0] == [2, 2, 2]  # all of it was there
    assert run(6, part="2/2")[0] == [3, 3, 3]
    assert asked == [[0, 1], [2, 3, 4], [5]]
    run(1, model="another")  # another model's answers are not this one's
    assert asked[-1] == [0] and len(rows.read_text().splitlines()) == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"part": "3/2"}, "part='3/2' must be"),
        ({"part": "2/2"}, "there are only 1 questions"),
        ({"rows": "/nowhere/rows.jsonl"}, "there is no folder '/nowhere'"),
        ({"hint": "all"}, "hint='all'"),
    ],
)
def test_nonsense_is_refused_before_a_model_is_loaded(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        settings = Settings(model="no-such-model", questions=1, **options)
        BENCHMARK.perform(settings, Console())


def test_wilsons_interval_is_the_known_one_and_never_empty() -> None:
    low, high = wilson(20, 100)
    assert (low, high) == (pytest.approx(0.1334, abs=1e-4), pytest.approx(0.2888, abs=1e-4))
    assert wilson(0, 10)[0] == 0 < wilson(0, 10)[1]
    assert wilson(10, 10)[1] == pytest.approx(1) and wilson(10, 10)[0] < 0.8
    for count, trials in ((3, 2), (-1, 5), (0, 0)):
        with pytest.raises(ValueError, match="is no share"):
            wilson(count, trials)
