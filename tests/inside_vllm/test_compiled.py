"""vLLM's default mode compiles the model, which then checks none of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.vllm_engines import ALWAYS, Engine, Texts


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(ALWAYS, enforce_eager=False)
    yield engine
    engine.close()


def test_gaps_and_moved_text_in_the_compiled_model(engine: Engine, texts: Texts) -> None:
    compilation = engine.engine.vllm_config.compilation_config
    assert compilation.mode != 0, "the model was not compiled"
    assert engine.rows > 0 and engine.connector.planner.moves  # the self-check passed
    ids = texts.prompt(2, 1, 0)
    full = engine.full(ids)
    engine.ask(texts.prompt(0, 1, 2), tokens=1)
    engine.fresh()
    rows = engine.rows
    repaired = engine.ask(ids, {"ratio": 1.0})
    assert repaired.usage is not None and repaired.usage["moved_tokens"] > 400
    assert engine.rows - rows > 400
    assert repaired.tokens == full.tokens and repaired.difference(full) < 1e-4
    again = engine.ask(ids, "off")
    assert again.cached == 0 and again.logprobs == full.logprobs
