"""Documents that are kept as the mean of several readings serve moved, and never exactly."""

from __future__ import annotations

from random import Random

import pytest
import torch

from kvboost import ConfigError, PromptError, SpanKind
from kvboost.runtime.means import mean_of, neighbours_of
from paged_engines import TWO_LAYERS, leaks, paged_engine
from test_reuse import EXACT
from tiny import dynamic_model, make_engine, tiny_model

HEADER = "Read what follows. "
DOCUMENTS = ["".join(Random(number).choices("abcdefgh ", k=50)) + ". " for number in range(4)]
QUESTION = "Which word is the first one?"
MOVED = {"recompute_strategy": "none", "reuse_moved": "always"}


@pytest.fixture
def engine():
    with make_engine(tiny_model("llama")) as made:
        yield made
        assert made.check_integrity() == []


def prompt_of(engine, number: int) -> list[int]:
    return engine.encode("Something else:" + DOCUMENTS[number] + QUESTION)


def moved(scored) -> int:
    return sum(span.num_tokens for span in scored.reuse.spans if span.kind is SpanKind.MOVED)


def test_a_mean_is_taken_without_rotation(engine) -> None:
    rotation = engine._runtime.rotation
    shape = engine._model.forward.shape
    here, there = torch.randn(2, 2, shape.num_layers, shape.num_kv_heads, 5, shape.head_dim)
    at = {0: here, 7: there}
    readings = [
        (torch.stack([rotation.rotate_to(rows[0], start), rows[1]]), start)
        for start, rows in at.items()
    ]
    mean = mean_of(readings, rotation, 3)
    expected = (here + there) / 2
    assert torch.allclose(mean[1], expected[1], atol=1e-5)
    assert torch.allclose(mean[0], rotation.rotate_to(expected[0], 3), atol=1e-4)


def test_one_context_serves_as_that_reading_does(engine) -> None:
    assert engine.warm(DOCUMENTS, header=HEADER, contexts=1, cache_salt="mean") > 0
    (neighbours,) = neighbours_of(2, len(DOCUMENTS), 1)
    before = HEADER + "".join(DOCUMENTS[number] for number in neighbours)
    engine.warm(before + DOCUMENTS[2], header="", cache_salt="plain")
    prompt, answer = prompt_of(engine, 2), engine.encode("alpha")
    mean, plain = (
        engine.score(prompt, answer, cache_salt=salt, **MOVED) for salt in ("mean", "plain")
    )
    assert moved(mean) == moved(plain) >= len(DOCUMENTS[2])
    assert torch.allclose(mean.logits, plain.logits, atol=1e-3)


def test_several_contexts_are_as_many_readings(engine) -> None:
    engine.warm(DOCUMENTS, header=HEADER, contexts=1, cache_salt="one")
    engine.warm(DOCUMENTS, header=HEADER, contexts=3, cache_salt="three")
    assert len({tuple(some) for some in neighbours_of(2, len(DOCUMENTS), 3)}) > 1
    prompt, answer = prompt_of(engine, 2), engine.encode("alpha")
    one, three = (
        engine.score(prompt, answer, cache_salt=salt, **MOVED) for salt in ("one", "three")
    )
    assert moved(one) == moved(three) > 0
    assert not torch.allclose(one.logits, three.logits, atol=1e-3)


def test_a_mean_serves_no_exact_hit_and_is_continued_by_nothing(engine) -> None:
    engine.warm(DOCUMENTS, header=HEADER, contexts=2)
    prompt = HEADER + DOCUMENTS[1] + QUESTION
    assert engine.generate(prompt, 1, EXACT, keep=False).cached_tokens == 0
    spans = engine.generate(prompt, 1, reuse_moved="always", keep=False).spans
    assert {span.kind for span in spans} == {SpanKind.MOVED, SpanKind.COMPUTE}
    assert engine.warm(DOCUMENTS, header=HEADER, contexts=2) == 0  # they are known


def test_pages_keep_the_same_means(monkeypatch) -> None:
    with paged_engine(monkeypatch, sizes=TWO_LAYERS) as engine:
        with make_engine(tiny_model("llama", **TWO_LAYERS)) as plain:
            in_pages, in_buffers = (served_from_means(one) for one in (engine, plain))
        assert moved(in_pages) == moved(in_buffers) >= len(DOCUMENTS[2])
        assert torch.allclose(in_pages.logits, in_buffers.logits, atol=1e-3)
        assert leaks(engine) == []


def served_from_means(engine):
    engine.warm(DOCUMENTS[:3], header=HEADER, contexts=1)
    return engine.score(prompt_of(engine, 2), engine.encode("alpha"), **MOVED)


def test_contexts_need_other_documents_and_rotary_positions(engine, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="there are 2; give at least 3"):
        engine.warm(DOCUMENTS[:2], contexts=2)
    with pytest.raises(PromptError, match="a list of strings"):
        engine.warm(DOCUMENTS[0], contexts=2)
    with pytest.raises(ConfigError, match="contexts"):
        engine.warm(DOCUMENTS, contexts=-1)
    with monkeypatch.context() as split, pytest.raises(ConfigError, match="cannot be used: split"):
        split.setattr(engine._runtime, "no_means", "split")
        engine.warm(DOCUMENTS, contexts=2)
    with (
        make_engine(tiny_model("gpt2"), strict=False) as other,
        pytest.raises(ConfigError, match="needs rotary positions"),
    ):
        other.warm(DOCUMENTS, header=HEADER, contexts=2)
    with (
        make_engine(dynamic_model()) as short,
        pytest.raises(ConfigError, match="longer than this model can move"),
    ):
        short.warm(DOCUMENTS, header=HEADER, contexts=2)
