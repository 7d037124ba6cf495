"""The benchmark of larger models: a tiny shape takes every path on a CPU; goals are judged from
given figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import shapes
from benchmarks.entries import BENCHMARKS
from benchmarks.larger import run, streaming
from benchmarks.larger.streaming import code_edit, words_as_tokens
from kvboost.bench.texts.edits import CHOSEN, edits
from support.tiny import DEVICE


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has int4 products, and they need wider rows")
def test_a_tiny_shape_takes_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LEAST_STEPS", 4)
    monkeypatch.setattr(streaming, "MOST_STEPS", 4)
    monkeypatch.setattr(streaming, "PROMPT", 12)
    for module in (streaming, shapes):  # a smaller embedding
        monkeypatch.setattr(module, "VOCABULARY", 2048)
    monkeypatch.setattr(run, "TINY_MEMORY", 105 << 20)
    monkeypatch.setattr(streaming, "EDITS", (4, 4))  # the shortest
    console = Console(record=True, width=140)
    settings = BENCHMARKS["larger"].settings(shape="tiny", requests=(1, 2))
    plot = tmp_path / "larger.png"
    record = BENCHMARKS["larger"].perform(settings, console, plot=plot)
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = record["streaming"]["tiny"]
    assert found["layers"] == 16 and 0 < found["resident"] < 16
    runs = found["runs"]
    assert set(runs) == {"1 request", "2 requests", streaming.DRAFTED, streaming.CODE}
    assert runs["1 request"]["passes"] == 2 and runs["2 requests"]["tokens"] == 4
    assert runs[streaming.DRAFTED]["passes"] < runs[streaming.DRAFTED]["tokens"] == 4
    assert 0 < runs[streaming.CODE]["passes"] < runs[streaming.CODE]["tokens"], "no drafts"
    assert runs["1 request"]["copied_bytes"] == 2 * found["pass_bytes"]
    assert "layers are streamed" in console.export_text()
    assert "problems" not in record


def test_goals_are_judged_for_their_shape_and_memory() -> None:
    paces = {"1 request": 4.1, "8 requests": 30.0, streaming.CODE: 7.0}
    found: dict[str, Any] = {
        "runs": {name: {"tokens_per_s": n, "share_of_bus": 0.93} for name, n in paces.items()},
        "device_memory": 8 << 30,
        "peak_reserved": 7 << 30,
    }
    goals = run.goals_of("32b", found)
    assert [goal.met for goal in goals] == [True, True, True, False, True]
    assert [goal.figure for goal in goals] == ["93%", "4.10", "7.32 ×", "1.71 ×", "7GiB"]
    assert {goal.met for goal in run.goals_of("tiny", found)} == {None}


def test_the_answer_to_an_edit_is_the_code_with_one_name_changed() -> None:
    chosen = CHOSEN.strip().splitlines()
    for number, (line, (function, old, new)) in enumerate(zip(chosen, edits(), strict=False)):
        assert line == f"{function.module} {function.name} {old} {new}"
        texts = code_edit(number)
        assert function.name.split(".")[-1] in texts[1] and f" {old}," not in texts[1]
        words, edited = words_as_tokens(texts, 100)
        assert min(words) == 100 and max(words + edited) < 1000
        asked_for = words_as_tokens([f" {new}", *texts], 100)
        assert asked_for[2].count(100) > 0, "the new name"
        assert len(set(edited) - set(words)) <= 4, "nearly all words can be drafted"
