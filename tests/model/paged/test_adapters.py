"""Adapters of requests with pages: their rows run in the decode steps of all requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.adapters import QV, merge, write_adapter
from support.paged_engines import SMALL, forward_of, leaks, paged_engine, steps_of
from support.tiny import make_engine, tiny_model

PROMPT = "Ships"


def test_adapters_of_other_layers_and_ranks_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a request of the base model too, which is number 3 here."""
    monkeypatch.setattr("kvboost.model.paged.adapter_slots.FIRST_SLOTS", 1)
    monkeypatch.setattr("kvboost.model.paged.adapter_slots.MOST_SLOTS", 2)
    kinds = [{"targets": QV, "rank": 2}, {"rank": 20}, {"targets": ("gate_proj", "down_proj")}]
    model = tiny_model("llama", **SMALL)
    folders = [
        write_adapter(tmp_path / str(seed), model, seed=seed, **kind)  # type: ignore[arg-type]
        for seed, kind in enumerate(kinds)
    ]
    expected = []
    for merged in (*(merge(tiny_model("llama", **SMALL), folder) for folder in folders), model):
        with make_engine(merged) as engine:
            expected.append(engine.generate(PROMPT, 6).token_ids)
    assert len(set(map(tuple, expected))) == 4
    with paged_engine(monkeypatch) as engine:
        for number, folder in enumerate(folders):
            engine.load_adapter(str(number), folder)

        def answers(*numbers: int) -> list[list[int]]:
            each = [{"adapter": str(number)} if number < 3 else {} for number in numbers]
            found = engine.generate_batch([PROMPT] * len(numbers), 6, each=each)
            return [result.token_ids for result in found]

        assert answers(0) == expected[:1]  # the other layers have no adapter yet
        assert answers(3, 1) == [expected[3], expected[1]]
        assert set(steps_of(engine).buckets) == {(2, False, True)}
        for numbers in [(0, 1), (2, 0), (1, 2), (0, 1, 2)]:
            assert answers(*numbers) == [expected[number] for number in numbers]
        fused = forward_of(engine).layers
        assert fused is not None and len(fused) == 1
        slots = steps_of(engine).adapter_slots
        assert slots is not None and len(slots._slots) == 3  # as many as one step had
        drafted = engine.generate(PROMPT, 6, adapter="1", speculate=4)
        assert drafted.token_ids == expected[1]
        assert leaks(engine) == []
