"""The GPU benchmark: a tiny shape takes every path on a CPU; goals are judged from given times."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from benchmarks import gpu
from benchmarks.entries import BENCHMARKS
from kvboost import StockModel
from kvboost.errors import KVBoostError


def answered_together(_: StockModel, prompts: list[list[int]], tokens: int) -> list[list[float]]:
    """A second to read, then ten milliseconds a token."""
    return [[1 + 0.01 * token for token in range(tokens)] for _ in prompts]


def perform(**given: Any) -> tuple[dict[str, Any], str]:
    console = Console(record=True, width=140)
    settings = BENCHMARKS["gpu"].settings(**given)
    record = BENCHMARKS["gpu"].perform(settings, console)
    return record, console.export_text()


def test_a_tiny_shape_takes_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LONG", 20)
    monkeypatch.setattr(gpu, "ALONE", 64)
    monkeypatch.setattr(gpu, "TOGETHER", 32)
    monkeypatch.setattr(gpu, "DOCUMENTS", 2)
    # On a CPU, transformers' own takes most of the memory for its cache.
    monkeypatch.setattr(gpu, "answered_together", answered_together)
    given = {"shapes": ("tiny",), "lengths": (512,), "requests": (1, 2), "rounds": 1}
    record, shown = perform(**given)
    assert "problems" not in record, record["problems"]
    found = record["shapes"]["tiny"]
    times = found["times"]
    first = {gpu.READ, gpu.KNOWN, gpu.MOVED, gpu.IN_RAM, gpu.ON_DISK}
    assert set(times[gpu.OURS]) == {*first, gpu.STEP}
    assert all(times[gpu.OURS][what][512] > 0 for what in first)
    for name in (gpu.OURS, gpu.STOCK, gpu.BATCHING):
        assert set(times[name][gpu.STEP]) == {1, 2}
    assert times[gpu.STOCK][gpu.READ][512] > 0
    assert times[gpu.BATCHING][gpu.STEP][2] == pytest.approx(10.0)
    assert found["limit_ms"] > 0 and all(goal["met"] is None for goal in record["goals"])
    assert "known, disk, 512" in shown


def test_what_did_not_take_its_path_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing is kept, so nothing is known."""
    ask = gpu._ask
    monkeypatch.setattr(
        gpu, "_ask", lambda engine, prompt, **given: ask(engine, prompt, **{**given, "keep": False})
    )
    given = {"shapes": ("tiny",), "lengths": (256,), "requests": (1,), "rounds": 1}
    record, _ = perform(**given, ours_only=True)
    assert len(record["problems"]) == 3
    assert all("another path was measured: 0 tokens" in one for one in record["problems"])


def test_goals_are_judged_from_times_beside_those_of_vllm() -> None:
    theirs = {
        gpu.STEP: {1: 2.0, 64: 2.0},
        gpu.READ: {8192: 50.0},
        gpu.KNOWN: {8192: 10.0},
        gpu.MOVED: dict.fromkeys((2048, 8192, 32768), 51.0),
    }
    ours = {
        gpu.STEP: {1: 2.2, 64: 3.0},
        gpu.READ: {8192: 54.0},
        gpu.KNOWN: {8192: 11.0},
        gpu.IN_RAM: {8192: 6.0},
        gpu.MOVED: {2048: 25.0, 8192: 15.0, 32768: 20.0},
    }
    found = {"times": {gpu.VLLM: theirs, gpu.OURS: ours}, "limit_ms": 1.1, "notes": []}
    goals = gpu.goals_of({"7b": found})
    assert [goal.met for goal in goals] == [True, False, True, True, True, True, None, False, True]
    assert goals[1].figure == "1.50"


def test_mxfp4_is_said_beside_vllm_and_for_no_other_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(KVBoostError, match="--mxfp4 is for --shape gpt-oss-20b, not tiny"):
        perform(shapes=("tiny",), mxfp4=True)
    times = {gpu.VLLM: {gpu.STEP: {1: 2.0}}, gpu.OURS: {gpu.STEP: {1: 1.0}}}
    found = {"times": times, "limit_ms": 0.5, "notes": [], "weights": "packed (triton, MXFP4)"}
    console = Console(record=True, width=200)
    console.print(gpu.table_of("gpt-oss-20b", found))
    shown = " ".join(console.export_text().split())
    assert "(KVBoost: packed (triton, MXFP4); vLLM: plain, bfloat16)" in shown
