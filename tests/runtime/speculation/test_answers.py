"""Drafts change how fast an answer comes, never the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.config import GenerationMode
from kvboost.results import GenerationResult
from kvboost.tokens.hashing import as_token_ids
from support.paged_engines import leaks, paged_engine, steps_of
from support.prompts import words
from support.scripted_drafts import always_draft, always_wrong, at_random, oracle, script
from support.tiny import EOS, longrope_model, make_engine, runner_of, tiny_model

PROMPT = words(5, 40)
SEEDED = {"temperature": 1.2, "top_k": 40, "seed": 11}
SCRIPTS = [oracle, always_wrong, at_random]
MOST = 6


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama")) as made:
        yield made
        assert made.check_integrity() == []


@pytest.fixture
def rows_run(engine: KVBoost, monkeypatch) -> list[list[int]]:
    """The number of rows of each segment, forward by forward."""
    seen: list[list[int]] = []
    forward = runner_of(engine)
    run = forward.run

    def counted(segments: Any) -> Any:
        seen.append([len(segment) for segment in segments])
        return run(segments)

    monkeypatch.setattr(forward, "run", counted)
    return seen


def key(prompt: Any) -> bytes:
    return as_token_ids(np.array(prompt)).tobytes()


def check(engine: KVBoost, monkeypatch, count: int = 24, **options: Any) -> GenerationResult:
    """Answers without drafts and with those of every script: the same answer, which it returns."""
    plain = engine.generate(PROMPT, count, keep=False, **options)
    assert plain.drafted_tokens == plain.accepted_tokens == 0
    for how in SCRIPTS:
        script(monkeypatch, engine, {key(PROMPT): plain.token_ids}, how)
        drafted = engine.generate(PROMPT, count, keep=False, speculate=MOST, **options)
        assert drafted.drafted_tokens > 0
        assert (drafted.accepted_tokens > 0) == (how is not always_wrong)
        assert_same(plain, drafted)
    return plain


def assert_same(plain: GenerationResult, drafted: GenerationResult) -> None:
    assert drafted.token_ids == plain.token_ids
    assert drafted.output_text == plain.output_text
    assert drafted.finish_reason == plain.finish_reason
    for one, other in zip(plain.logprobs or (), drafted.logprobs or (), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "bloom"])
def test_tokens_are_those_without_drafts(name: str, tiny_engine, monkeypatch) -> None:
    for options in ({}, SEEDED):
        check(tiny_engine(name), monkeypatch, ignore_eos=True, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"logit_bias": {65: 6.0, 66: 5.0}, "temperature": 1.0, "min_p": 0.02, "seed": 3},
        {"logprobs": 2, "top_p": 0.9, "seed": 5},
    ],
)
def test_drafts_change_no_token_however_it_is_picked(engine, monkeypatch, options) -> None:
    check(engine, monkeypatch, ignore_eos=True, **options)


def test_drafts_are_counted_by_row(engine, monkeypatch, rows_run) -> None:
    plain = engine.generate(PROMPT, 22, keep=False, ignore_eos=True)
    script(monkeypatch, engine, {key(PROMPT): plain.token_ids}, oracle)
    drafted = engine.generate(PROMPT, 22, keep=False, ignore_eos=True, speculate=MOST)
    # One token after the prompt; then six drafted and one more, three times.
    assert rows_run[-3:] == [[7], [7], [7]]
    assert (drafted.drafted_tokens, drafted.accepted_tokens) == (18, 18)
    script(monkeypatch, engine, {key(PROMPT): plain.token_ids}, always_wrong)
    drafted = engine.generate(PROMPT, 10, keep=False, ignore_eos=True, speculate=MOST)
    # The last steps draft no more than the answer may still get.
    assert rows_run[-9:] == [[7], [7], [7], [6], [5], [4], [3], [2], [1]]
    assert (drafted.drafted_tokens, drafted.accepted_tokens) == (33, 0)
    stats = engine.cache_stats()
    assert stats["drafted_tokens"] >= 51 and stats["accepted_tokens"] >= 18


def test_an_answer_may_end_inside_a_draft(engine, monkeypatch) -> None:
    letters = {engine.encode(letter)[0]: 40.0 for letter in "abcdefgh"}
    whole = engine.generate(PROMPT, 24, keep=False, logit_bias=letters, **SEEDED)
    stop = whole.output_text[10:12]
    stopped = check(engine, monkeypatch, stop=stop, logit_bias=letters, **SEEDED)
    assert stopped.finish_reason == "stop" and 2 < len(stopped.token_ids) <= 12
    check(engine, monkeypatch, 12, logit_bias=letters, **SEEDED)
    options = _ends_early(engine, {**letters, EOS: 40.0})
    ended = check(engine, monkeypatch, **options)
    assert ended.finish_reason == "stop" and ended.token_ids[-1] == EOS
    assert 4 < len(ended.token_ids) < 20


def _ends_early(engine: KVBoost, bias: dict[int, float]) -> dict[str, Any]:
    """Options with which an answer of 24 tokens ends after 5 to 19. Devices draw other tokens for a
    seed; of those drawn with ``bias``, about one in nine is the end."""
    for seed in range(30):
        options = {**SEEDED, "seed": seed, "logit_bias": bias}
        if 4 < len(engine.generate(PROMPT, 24, keep=False, **options).token_ids) < 20:
            return options
    raise AssertionError("no seed gives such an answer")


def test_drafts_keep_to_a_grammar(engine, monkeypatch) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [7, 70, 71]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for options in ({"temperature": 1.5, "seed": 2}, {"logprobs": 0}):
        assert check(engine, monkeypatch, 100, schema=schema, **options).finish_reason == "stop"


def test_a_batch_mixes_them_with_others(engine, monkeypatch, rows_run) -> None:
    prompts = [words(seed, 30 + seed) for seed in range(4)]
    each: list[Any] = [{}, SEEDED, {"temperature": 0.9, "seed": 1}, {"speculate": "off"}]
    plain = [
        engine.generate(prompt, 16, keep=False, ignore_eos=True, **options)
        for prompt, options in zip(prompts, each, strict=True)
    ]
    answers = {key(p): one.token_ids for p, one in zip(prompts, plain, strict=True)}
    script(monkeypatch, engine, answers, at_random)
    rows_run.clear()
    drafted = engine.generate_batch(
        prompts, 16, each=each, keep=False, ignore_eos=True, speculate=MOST
    )
    for one, other in zip(plain, drafted, strict=True):
        assert_same(one, other)
    assert [one.drafted_tokens > 0 for one in drafted] == [True, True, True, False]
    assert any(len(rows) == 4 and max(rows) > 1 for rows in rows_run)


@pytest.mark.parametrize("how", [always_wrong, at_random])
def test_rows_of_rejected_tokens_are_not_kept(engine, monkeypatch, how) -> None:
    plain = engine.generate(PROMPT, 24, keep=False, ignore_eos=True)
    script(monkeypatch, engine, {key(PROMPT): plain.token_ids}, how)
    salt = {"cache_salt": how.__name__}
    drafted = engine.generate(PROMPT, 24, ignore_eos=True, speculate=MOST, **salt)
    assert drafted.drafted_tokens > drafted.accepted_tokens
    ids, follows = [*PROMPT, *drafted.token_ids], [1, 2]
    score = engine.score(ids, follows, GenerationMode.PREFIX_CACHE, **salt)
    full = engine.score(ids, follows, GenerationMode.BASELINE)
    assert score.reuse.cached_tokens == len(ids) - 1  # all rows but that of the last token
    torch.testing.assert_close(score.logits, full.logits, atol=1e-4, rtol=1e-4)
    root = engine.runtime.root(how.__name__)
    infos = engine.runtime.store.holdings.catalogue.infos().values()
    kept = [info.token_ids.tolist() for info in infos if info.root == root]
    assert sum(map(len, kept)) == len(ids) - 1


def test_a_stream_that_is_closed_keeps_confirmed_rows_only(engine, monkeypatch) -> None:
    letters = {engine.encode(letter)[0]: 40.0 for letter in "abcdefgh"}
    options = {**SEEDED, "logit_bias": letters, "ignore_eos": True}
    plain = engine.generate(PROMPT, 24, keep=False, **options)
    script(monkeypatch, engine, {key(PROMPT): plain.token_ids}, at_random)
    salt = {"cache_salt": "closed"}
    with engine.stream(PROMPT, 24, speculate=MOST, **options, **salt) as stream:
        while len(stream.result.token_ids) < 6:
            next(stream)
    ids = [*PROMPT, *stream.result.token_ids]
    assert len(ids) > len(PROMPT) + 4
    assert ids == [*PROMPT, *plain.token_ids][: len(ids)]
    score = engine.score(ids, [1], GenerationMode.PREFIX_CACHE, **salt)
    full = engine.score(ids, [1], GenerationMode.BASELINE)
    assert score.reuse.cached_tokens > len(PROMPT)
    torch.testing.assert_close(score.logits, full.logits, atol=1e-4, rtol=1e-4)


def test_off_and_baseline_draft_nothing(engine, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("no drafter is needed")

    monkeypatch.setattr(engine.runtime.speculation, "make_drafters", fail)
    for options in ({"speculate": "off"}, {"speculate": 8, "mode": "baseline"}):
        result = engine.generate(PROMPT, 6, keep=False, ignore_eos=True, **options)
        assert result.drafted_tokens == 0


def test_a_position_at_which_the_rotation_changes_ends_a_draft(monkeypatch) -> None:
    with make_engine(longrope_model()) as engine:
        prompt = words(3, 50)
        plain = engine.generate(prompt, 24, keep=False, ignore_eos=True)
        script(monkeypatch, engine, {key(prompt): plain.token_ids}, at_random)
        drafted = engine.generate(prompt, 24, keep=False, ignore_eos=True, speculate=MOST)
        assert drafted.drafted_tokens > 0
        assert_same(plain, drafted)


def test_over_pages_tokens_are_the_same(monkeypatch) -> None:
    prompt = words(1, 6)
    given = {"ignore_eos": True, "keep": False, "temperature": 1.0, "seed": 4}
    with paged_engine(monkeypatch) as engine:
        plain = engine.generate(prompt, 5, **given)
        assert steps_of(engine).num_ahead > 0
        wrong_once = [*plain.token_ids[:3], 0, 0]
        script(monkeypatch, engine, {key(prompt): wrong_once}, oracle)
        drafted = engine.generate(prompt, 5, speculate=3, **given)
        assert_same(plain, drafted)
        assert 0 < drafted.accepted_tokens < drafted.drafted_tokens
        assert steps_of(engine).drafts.num_steps > 0
        penalized = {**given, "repetition_penalty": 1.3}
        plain = engine.generate(prompt, 5, speculate="off", **penalized)
        assert_same(plain, engine.generate(prompt, 5, speculate=3, **penalized))
        assert leaks(engine) == []


def test_over_pages_a_step_has_requests_with_and_without_drafts(monkeypatch) -> None:
    prompts = [words(number, 6) for number in (1, 2)]
    given = {"ignore_eos": True, "keep": False}
    with paged_engine(monkeypatch) as engine:
        plain = engine.generate_batch(prompts, 6, **given)
        steps = steps_of(engine)
        assert steps.num_ahead > 0 and steps.drafts.num_steps == 0
        answers = {key(prompts[0]): [*plain[0].token_ids[:4], 0, 0], key(prompts[1]): []}
        script(monkeypatch, engine, answers, oracle)
        drafted = engine.generate_batch(prompts, 6, speculate=3, **given)
        for one, other in zip(plain, drafted, strict=True):
            assert_same(one, other)
        assert steps.drafts.num_steps > 0
        assert drafted[0].accepted_tokens > 0 == drafted[1].drafted_tokens
        assert leaks(engine) == []


def test_the_engine_drafts_from_what_was_read(monkeypatch) -> None:
    with make_engine(tiny_model("llama"), speculate=8) as engine:
        always_draft(monkeypatch)
        first = engine.generate(PROMPT, 30, ignore_eos=True)
        again = engine.generate(PROMPT, 30, ignore_eos=True)  # its own text says how it goes on
        other = engine.generate(PROMPT, 30, ignore_eos=True, cache_salt="other")
        assert again.token_ids == other.token_ids == first.token_ids
        assert again.accepted_tokens == again.drafted_tokens == 25 > other.accepted_tokens
        engine.forget_salt("")
        forgotten = engine.generate(PROMPT, 30, ignore_eos=True, keep=False)
        assert forgotten.accepted_tokens == first.accepted_tokens
        assert engine.generate(PROMPT, 30, ignore_eos=True).accepted_tokens == first.accepted_tokens


def test_what_would_be_drafted_is_measured_where_it_does_not_pay(monkeypatch) -> None:
    with make_engine(tiny_model("llama"), speculate="auto") as engine:
        monkeypatch.setattr(engine.runtime.cost, "step", lambda rows, keys, **_: float(rows))
        first = engine.generate(PROMPT, 40, ignore_eos=True)
        again = engine.generate(PROMPT, 40, ignore_eos=True)
        assert again.token_ids == first.token_ids and again.drafted_tokens == 0
        chances = engine.runtime.speculation._chances
        assert chances.of(("text", 17), 0.5) > 0.8
        monkeypatch.setattr(engine.runtime.cost, "step", lambda rows, keys, **_: 1.0)
        assert engine.generate(PROMPT, 40, ignore_eos=True).accepted_tokens > 30
