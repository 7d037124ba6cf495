"""Adapters of requests with pages: their rows run eagerly, beside the decode steps of others."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters import merge, write_adapter
from paged_engines import SMALL, leaks, paged_engine, steps_of
from tiny import make_engine, tiny_model

PROMPT = "Ships"
TOKENS = 3


def test_a_batch_of_base_and_adapted_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_adapter(tmp_path, tiny_model("llama", **SMALL))
    expected = []
    for model in (tiny_model("llama", **SMALL), merge(tiny_model("llama", **SMALL), folder)):
        with make_engine(model) as engine:
            expected.append(engine.generate(PROMPT, TOKENS).token_ids)
    assert expected[0] != expected[1]
    with paged_engine(monkeypatch) as engine:
        engine.load_adapter("a", folder)
        found = engine.generate_batch([PROMPT] * 2, TOKENS, each=[{}, {"adapter": "a"}])
        assert [result.token_ids for result in found] == expected
        fused = engine._model.forward.fused_layers
        assert fused is not None and len(fused) == 1
        # Steps take the rows of the base model only.
        assert set(steps_of(engine)._buckets) == {(1, False)}
        assert leaks(engine) == []
