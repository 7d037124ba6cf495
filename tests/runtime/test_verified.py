"""Verified answers are those of a full prefill, and cost what mode ``prefix_cache`` costs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvboost import ConfigError, SpanKind
from kvboost.runtime.generation import Generation
from support.healed import SLOPPY, num_exact, warmed
from support.paged_engines import TWO_LAYERS, leaks, paged_engine, steps_of
from support.prompts import BASELINE, EXACT, HEADER, PASSAGES, QUESTION, prompt_of, words
from support.requests import begin
from support.tiny import (
    dynamic_model,
    longrope_model,
    make_engine,
    runner_of,
    tiny_model,
)

VERIFIED = {**SLOPPY, "exactness": "verified"}
NOTE = "verified: only exact hits are reused"


@pytest.fixture
def engine():
    with warmed(make_engine(tiny_model("llama"))) as made:
        yield made
        assert made.check_integrity() == []


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "gpt_oss"])
def test_a_greedy_answer_is_that_of_a_full_prefill(name, tiny_engine) -> None:
    engine = warmed(tiny_engine(name), "verified")
    prompt = prompt_of([3, 1])
    full = engine.generate(prompt, 12, BASELINE, ignore_eos=True)
    moved = engine.generate(prompt, 12, cache_salt="verified", keep=False, **SLOPPY)
    result = engine.generate(prompt, 12, cache_salt="verified", **VERIFIED)
    assert moved.moved_tokens > 30 and moved.answer_exact_from == 12
    assert result.moved_tokens == 0 and NOTE in result.reuse.notes
    assert result.token_ids == full.token_ids
    assert result.answer_exact_from == 0 and result.healing is None
    ids = [*prompt, *result.token_ids]
    assert num_exact(engine, ids, "verified") == len(ids) - 1
    assert engine.heal().conversations == 0  # nothing is left to heal
    engine.forget_salt("verified")


def test_verified_answers_compute_the_rows_that_prefix_cache_computes(engine, monkeypatch) -> None:
    prompt = prompt_of([3, 1])
    forward = runner_of(engine)
    run = forward.run
    rows: list[list[int]] = []

    def spy(segments):
        rows[-1].extend(len(segment) for segment in segments)
        return run(segments)

    monkeypatch.setattr(forward, "run", spy)
    for options in ({"mode": EXACT, "ignore_eos": True}, VERIFIED):
        rows.append([])
        engine.generate(prompt, 9, keep=False, **options)
    assert rows[0] == rows[1] and sum(rows[0]) > 9


def test_exact_hits_are_used(engine) -> None:
    prompt = [*HEADER, *PASSAGES[0], *QUESTION]
    result = engine.generate(prompt, 4, **VERIFIED)
    assert result.exact_tokens == len(HEADER) + len(PASSAGES[0])
    with pytest.raises(ConfigError, match="exactness='sure' is not available"):
        engine.generate([1, 2], exactness="sure")
    assert NOTE not in engine.generate(prompt, 4, BASELINE, exactness="verified").reuse.notes


def test_a_seed_gives_the_tokens_that_it_gives_after_a_full_prefill(engine) -> None:
    how = {"temperature": 0.8, "top_k": 20}
    for seed in range(4):
        prompt = prompt_of([3, 1], words(seed, 12))
        full = engine.generate(prompt, 10, BASELINE, ignore_eos=True, seed=seed, **how)
        result = engine.generate(prompt, 10, seed=seed, **VERIFIED, **how)
        assert result.token_ids == full.token_ids


def test_sampling_has_the_distribution_of_a_full_prefill(engine) -> None:
    """Chi-squared of the first token over its likeliest values. Moved text has another
    distribution, which this test tells from the exact one."""
    prompt, rounds = prompt_of([3, 1]), 200
    options = {"temperature": 0.25, "keep": False}
    exact, moved = (
        torch.softmax(
            engine.score(prompt, [7], mode, recompute_strategy="none").logits[0] / 0.25, 0
        )
        for mode in (BASELINE, "chunk_kv_reuse")
    )
    seen = Counter(
        engine.generate(prompt, 1, seed=seed, **VERIFIED, **options).token_ids[0]
        for seed in range(rounds)
    )

    def chi_squared(expected: torch.Tensor) -> float:
        likely = expected.topk(5).indices.tolist()
        cells = [(seen[one], float(expected[one])) for one in likely]
        rest = 1 - sum(share for _, share in cells)
        cells.append((rounds - sum(count for count, _ in cells), rest))
        return sum((count - rounds * share) ** 2 / (rounds * share) for count, share in cells)

    assert chi_squared(exact) < 25.7  # one in ten thousand, 5 degrees of freedom
    assert chi_squared(moved) > 25.7


def test_text_is_released_token_by_token(engine) -> None:
    with engine.stream(prompt_of([3, 1]), 8, **VERIFIED) as stream:
        next(stream)
        assert stream.result.answer_exact_from == 0 and stream.result.generated_tokens < 8
        for _ in stream:
            pass
    assert stream.result.generated_tokens == 8


def test_a_conversation_on_approximate_rows_is_verified_too(engine) -> None:
    prompt = prompt_of([3, 1])
    first = engine.generate(prompt, 6, **{**SLOPPY, "heal": "off"})
    follow = [*prompt, *first.token_ids, *words(8, 12)]
    assert engine.plan(follow, recompute_strategy="none").count(SpanKind.APPROXIMATE) > 30
    full = engine.generate(follow, 8, BASELINE, ignore_eos=True)
    result = engine.generate(follow, 8, **VERIFIED)
    assert result.approximate_tokens == result.moved_tokens == 0
    assert result.token_ids == full.token_ids
    assert engine.generate(follow, 8, EXACT, ignore_eos=True).token_ids == full.token_ids


def test_a_batch_verifies_beside_other_requests(engine) -> None:
    prompts = [prompt_of(order) for order in ([3, 1], [2, 0], [1, 2])]
    full = [engine.generate(prompt, 10, BASELINE, ignore_eos=True) for prompt in prompts]
    each = [{"exactness": "verified"}, {}, {"exactness": "verified"}]
    results = engine.generate_batch(prompts, 10, each=each, **SLOPPY)
    assert [one.answer_exact_from for one in results] == [0, 10, 0]
    for number in (0, 2):
        assert results[number].token_ids == full[number].token_ids
        ids = [*prompts[number], *results[number].token_ids]
        assert num_exact(engine, ids) == len(ids) - 1


@pytest.mark.parametrize("forwards", [1, 4, 8])
def test_a_cancelled_one_leaves_only_exact_rows(engine, monkeypatch, forwards) -> None:
    prompt = prompt_of([3, 1])
    monkeypatch.setattr(engine.runtime.backend, "prefill_slice", 16)
    state = begin(engine, prompt, 6, "chunk_kv_reuse", **VERIFIED)
    steps = Generation(engine.runtime, state).steps()
    given = None
    for _ in range(forwards):
        segment = steps.send(given)
        given = None if segment is None else runner_of(engine).run([segment])[0]
    state.closing = True
    steps.close()
    ids = [*prompt, *state.token_ids]
    assert num_exact(engine, ids) == state.rows and engine.heal().conversations == 0


@pytest.mark.parametrize("model", [dynamic_model, longrope_model])
def test_rotation_may_depend_on_the_length(model) -> None:
    with make_engine(model()) as engine:  # the limit is 64 rows
        engine.warm(words(1, 40))
        prompt = [*words(2, 3), *words(1, 40), *words(3, 16)]
        full = engine.generate(prompt, 12, BASELINE, ignore_eos=True)
        result = engine.generate(prompt, 12, **VERIFIED)
        assert result.moved_tokens == 0 and result.token_ids == full.token_ids


HOW = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 5},
    "penalized": {"repetition_penalty": 1.8},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_answers_in_pages_are_verified_too(monkeypatch, how) -> None:
    with paged_engine(monkeypatch, sizes=TWO_LAYERS) as engine:
        engine.warm([*HEADER, *PASSAGES[1]])
        prompt = [*words(5, 5), *PASSAGES[1], *QUESTION]
        exact = engine.generate(prompt, 7, BASELINE, ignore_eos=True, **how)
        result = engine.generate(prompt, 7, **VERIFIED, **how)
        assert result.token_ids == exact.token_ids
        assert steps_of(engine).num_ahead > 0 and not leaks(engine)
