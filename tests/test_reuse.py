"""Text read at another place: found, moved, repaired, counted, never taken for exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import KVBoost, SpanKind
from kvboost.config import CONTROLS, STRATEGIES
from support.prompts import (
    BASELINE,
    EXACT,
    HEADER,
    MOVED,
    PASSAGES,
    QUESTION,
    SLOPPY,
    prompt_of,
    words,
)
from support.tiny import CONTEXT, in_slices, make_engine, tiny_model

ALL = {"recompute_strategy": "query", "recompute_ratio": 1.0}


def count(result, kind: SpanKind) -> int:
    return sum(span.num_tokens for span in result.spans if span.kind is kind)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "internvl"])
def test_recomputing_everything_is_a_full_prefill_in_any_order(name, tiny_engine) -> None:
    engine = tiny_engine(name)

    @settings(max_examples=3)
    @given(st.permutations(range(4)), st.permutations(range(4)), st.integers(0, 12))
    def check(read, asked, header) -> None:
        salt = f"{read}{asked}{header}"
        engine.generate(prompt_of(read), 1, EXACT, cache_salt=salt)
        prompt = prompt_of(asked, words(300, header))
        answer = words(5, 6)
        full = engine.score(prompt, answer, BASELINE, cache_salt=salt)
        moved = engine.score(prompt, answer, MOVED, cache_salt=salt, **ALL)
        kinds = {span.kind for span in moved.reuse.spans}
        assert SpanKind.MOVED in kinds or prompt == prompt_of(read)
        assert torch.allclose(full.logits, moved.logits, atol=1e-3)
        engine.forget_salt(salt)

    check()


@pytest.mark.parametrize("strategy", (*STRATEGIES, *CONTROLS))
def test_every_strategy_serves_moved_passages_and_reports_its_cost(engine, strategy) -> None:
    engine.warm(prompt_of([0, 1, 2, 3]))
    prompt = prompt_of([3, 1, 0, 2])
    result = engine.generate(prompt, 4, recompute_strategy=strategy, recompute_ratio=0.25)
    assert result.prompt_tokens == len(prompt)
    assert result.exact_tokens + result.moved_tokens + count(result, SpanKind.COMPUTE) == len(
        prompt
    )
    assert result.moved_tokens > 100
    assert result.cached_tokens == (
        result.exact_tokens + result.moved_tokens - result.recomputed_tokens
    )
    assert result.reuse.strategy == strategy
    recomputed = {
        "auto": range(1, round(0.5 * result.moved_tokens) + 1),
        "query": [round(0.25 * result.moved_tokens)],
        "cacheblend": [round(0.25 * result.moved_tokens)],
        "random": [round(0.25 * result.moved_tokens)],
        "none": [0],
    }
    if strategy in recomputed:
        assert result.recomputed_tokens in recomputed[strategy]
    looked = result.reuse.charged_tokens - result.recomputed_tokens
    assert (looked > 0) == (strategy in ("auto", "query", "cacheblend"))
    moved = {
        row
        for span in result.spans
        if span.kind is SpanKind.MOVED
        for row in range(span.start, span.end)
    }
    assert moved >= set(result.reuse.recomputed)


def test_seams_are_repaired_on_both_sides(engine, monkeypatch) -> None:
    monkeypatch.setattr("kvboost.reuse.repair.OVERLAP", 5)
    engine.warm([*HEADER, *PASSAGES[0]])
    engine.warm([*HEADER, *PASSAGES[2]])
    result = engine.generate(prompt_of([1, 0, 3, 2]), 1, recompute_strategy="selective")
    first = len(HEADER) + len(PASSAGES[1])
    assert result.reuse.recomputed[:10] == (
        *range(first, first + 5),
        *range(first + 35, first + 40),
    )
    assert result.recomputed_tokens == 20


def test_cacheblend_recomputes_the_rows_that_deviate_most(engine) -> None:
    """Against the definition: layer 0 in full, distance of fresh and stale KV in layer 1."""
    engine.warm([*HEADER, *PASSAGES[0]])
    prompt = [*words(7, 30), *PASSAGES[0], *QUESTION]
    kv = full_kv(engine, prompt)
    stale = full_kv(engine, [*HEADER, *PASSAGES[0]])
    rows, donor = slice(30, 70), slice(len(HEADER), len(HEADER) + 40)
    moved = torch.empty_like(stale[0, :, :, donor])
    engine.runtime.backend.rotation.move(stale[0, :, :, donor], 30 - len(HEADER), moved)
    distance = (kv[0, 1, :, rows] - moved[1]).square() + (
        kv[1, 1, :, rows] - stale[1, 1, :, donor]
    ).square()
    expected = distance.sum((0, 2)).topk(10).indices + 30
    result = engine.generate(prompt, 1, recompute_strategy="cacheblend", recompute_ratio=0.25)
    assert set(result.reuse.recomputed) == set(expected.tolist())


def test_query_ranks_rows_alike_for_any_ratio(engine) -> None:
    engine.warm([*HEADER, *PASSAGES[0]])
    prompt = [*HEADER[:4], *PASSAGES[0], *QUESTION]
    chosen = [
        set(
            engine.generate(
                prompt, 1, recompute_strategy="query", recompute_ratio=ratio, keep=False
            ).reuse.recomputed
        )
        for ratio in (0.2, 0.4)
    ]
    assert len(chosen[0]) == 8 and chosen[0] < chosen[1]


def full_kv(engine: KVBoost, ids: list[int]) -> torch.Tensor:
    from kvboost.model.execution.kv import RequestKV
    from kvboost.model.execution.segment import Segment

    kv = RequestKV(engine.model.forward.shape, len(ids))
    engine.model.forward([Segment(kv, torch.tensor(ids), range(len(ids)))])
    return kv.rows(0, len(ids))


def test_repair_brings_the_answer_closer(engine) -> None:
    for passage in PASSAGES:
        engine.warm([*HEADER, *passage])
    prompt, answer = prompt_of([3, 1, 0, 2]), words(9, 8)
    full = engine.score(prompt, answer, BASELINE).logits.log_softmax(-1)

    def distance(**repair) -> float:
        logits = engine.score(prompt, answer, MOVED, **repair).logits.log_softmax(-1)
        return float((full.exp() * (full - logits)).sum(-1).mean())

    untouched = distance(recompute_strategy="none")
    half = distance(recompute_strategy="query", recompute_ratio=0.5)
    assert half < untouched
    assert distance(**ALL) < 1e-6


def test_new_text_between_moved_passages_is_computed_and_not_probed(engine) -> None:
    for passage in PASSAGES[:2]:
        engine.warm([*HEADER, *passage])
    prompt = [*HEADER, *PASSAGES[1], *words(50, 30), *PASSAGES[0], *QUESTION]
    options = {"recompute_strategy": "query", "recompute_ratio": 0.5, "keep": False}
    result = engine.generate(prompt, 1, **options)
    # The first passage after the same header is exact; the second one moved.
    assert result.exact_tokens == len(HEADER) + len(PASSAGES[1])
    assert result.moved_tokens == len(PASSAGES[0])
    full = engine.score(prompt, [1, 2], BASELINE).logits
    moved = engine.score(prompt, [1, 2], MOVED, cache_salt="", **ALL).logits
    assert torch.allclose(full, moved, atol=1e-3)


def test_prefix_mode_and_other_salts_never_see_moved_text(engine) -> None:
    engine.warm(prompt_of([0, 1]), cache_salt="a")
    prompt = prompt_of([1, 0])
    assert engine.generate(prompt, 1, EXACT, cache_salt="a", keep=False).moved_tokens == 0
    assert engine.generate(prompt, 1, MOVED, cache_salt="b", **SLOPPY).moved_tokens == 0
    assert engine.generate(prompt, 1, MOVED, cache_salt="a", **SLOPPY).moved_tokens > 0


def test_slices_repair_like_one_forward() -> None:
    logits = []
    for slice_rows in (1024, 7, 30):
        with in_slices(make_engine(tiny_model("llama")), slice_rows) as engine:
            engine.warm(prompt_of([0, 1, 2, 3]))
            prompt = prompt_of([3, 1, 0, 2])
            scored = engine.score(prompt, words(9, 12), MOVED, recompute_strategy="cacheblend")
            logits.append(scored.logits)
            everything = engine.score(prompt, words(9, 12), MOVED, **ALL).logits
            full = engine.score(prompt, words(9, 12), BASELINE).logits
            assert torch.allclose(everything, full, atol=1e-3)
    assert torch.allclose(logits[0], logits[1], atol=1e-3)
    assert torch.allclose(logits[0], logits[2], atol=1e-3)


def test_keep_false_leaves_nothing(engine) -> None:
    before = engine.cache_stats()["hot_chunks"]
    engine.generate(prompt_of([0]), 2, keep=False)
    assert engine.cache_stats()["hot_chunks"] == before


# Lineage


def test_nothing_on_top_of_moved_rows_serves_an_exact_hit(engine) -> None:
    engine.warm(prompt_of([0, 1]))
    prompt = prompt_of([1, 0])
    moved = engine.generate(prompt, 6, MOVED, **SLOPPY)
    assert moved.moved_tokens > 0
    follow_up = [*prompt, *moved.token_ids, *words(60, 10)]
    exact = engine.generate(follow_up, 6, EXACT)
    assert exact.exact_tokens <= len(HEADER)  # the header alone was computed on nothing moved
    assert exact.token_ids == engine.generate(follow_up, 6, BASELINE).token_ids


@settings(max_examples=6)
@given(st.data())
def test_exact_answers_stay_exact_after_any_moved_reuse(data) -> None:
    """An adversarial sequence of calls: every exact answer equals the baseline's."""
    with make_engine(tiny_model("llama")) as engine:
        talk = prompt_of(data.draw(st.permutations(range(3))))
        engine.generate(talk, 2, EXACT)
        for step in range(4):
            order = data.draw(st.permutations(range(3)))
            prompt = data.draw(st.sampled_from([talk, prompt_of(order)]))[: CONTEXT - 30]
            mode = data.draw(st.sampled_from([EXACT, MOVED]))
            result = engine.generate(prompt, 3, mode, **SLOPPY)
            check = engine.generate(prompt, 3, EXACT, keep=data.draw(st.booleans()))
            base = engine.generate(prompt, 3, BASELINE)
            assert check.token_ids == base.token_ids
            expected = engine.score(prompt, base.token_ids, BASELINE).logits
            actual = engine.score(prompt, base.token_ids, EXACT).logits
            assert torch.allclose(expected, actual, atol=1e-3)
            talk = [*prompt, *result.token_ids, *words(70 + step, 8)]
        assert engine.check_integrity() == []


def test_a_conversation_continues_over_its_own_approximate_rows(engine) -> None:
    engine.warm(prompt_of([0, 1]))
    talk = prompt_of([1, 0])
    first = engine.generate(talk, 4, MOVED, **SLOPPY)
    for turn in range(3):
        talk = [*talk, *first.token_ids, *words(80 + turn, 12)]
        result = engine.generate(talk, 4, MOVED, **SLOPPY)
        assert result.moved_tokens == 0 and result.reuse.strategy is None
        # Everything but the new words and the last generated token was in place.
        assert result.exact_tokens + result.approximate_tokens >= len(talk) - 12 - 2
        first = result


def test_the_exact_version_wins_once_there_is_one(engine) -> None:
    engine.warm(prompt_of([0, 1]))
    prompt = prompt_of([1, 0])
    engine.generate(prompt, 2, MOVED, **SLOPPY)
    assert engine.plan(prompt, **SLOPPY).spans[-2].kind is SpanKind.APPROXIMATE
    engine.generate(prompt, 2, EXACT)
    report = engine.plan(prompt, **SLOPPY)
    assert report.count(SpanKind.APPROXIMATE) == 0
    assert report.count(SpanKind.EXACT) == len(prompt) - 1


def test_a_request_does_not_continue_from_rows_with_another_repair(engine) -> None:
    engine.warm(prompt_of([0, 1]))
    prompt = prompt_of([1, 0])
    engine.generate(prompt, 1, **SLOPPY)
    careful = engine.score(prompt, [1, 2], **ALL)
    assert careful.reuse.count(SpanKind.APPROXIMATE) == 0
    assert torch.allclose(careful.logits, engine.score(prompt, [1, 2], BASELINE).logits, atol=1e-3)


def test_originals_are_preferred_to_copies(engine) -> None:
    engine.warm([*HEADER, *PASSAGES[0]])
    for number in range(12):  # each leaves an approximate copy of the passage
        engine.generate([*words(400 + number, 20), *PASSAGES[0], *QUESTION], 1, **SLOPPY)
    report = engine.plan([*words(500, 20), *PASSAGES[0], *QUESTION], **SLOPPY)
    (root,) = {span.donor for span in engine.plan([*HEADER, *PASSAGES[0], 1]).spans[:1]}
    donors = [span.donor for span in report.spans if span.kind is SpanKind.MOVED]
    lineages = {
        engine.runtime.store.holdings.catalogue.info(donor).lineage.value for donor in donors
    }
    assert root in donors and lineages == {"exact"}


def test_a_few_approximate_rows_do_not_make_a_new_prompt_approximate(engine) -> None:
    engine.warm(PASSAGES[0])
    engine.generate([*HEADER, *HEADER, *PASSAGES[0], *QUESTION], 1, **SLOPPY)
    other = [*HEADER, *HEADER, *PASSAGES[0][:3], *words(600, 60)]
    result = engine.generate(other, 1, MOVED, **SLOPPY)
    assert result.approximate_tokens == 0
    assert engine.plan(other, EXACT).count(SpanKind.EXACT) == len(other) - 1


def test_uninitialised_rows_do_not_reach_the_probe(engine) -> None:
    for passage in PASSAGES[:2]:
        engine.warm([*HEADER, *passage])
    prompt = [*words(700, 30), *PASSAGES[1], *words(701, 30), *PASSAGES[0], *QUESTION]
    options = {"recompute_strategy": "query", "recompute_ratio": 0.2, "keep": False}
    chosen = []
    for value in (0.0, float("nan")):
        with engine.runtime.pool.lend(CONTEXT * 2) as kv:
            kv.data.fill_(value)
        chosen.append(engine.generate(prompt, 1, **options).reuse.recomputed)
    assert chosen[0] == chosen[1] and len(chosen[0]) > 10


def test_forgetting_a_salt_forgets_what_is_approximate_too(engine) -> None:
    engine.warm(prompt_of([0, 1]), cache_salt="a")
    engine.generate(prompt_of([1, 0]), 2, MOVED, cache_salt="a", **SLOPPY)
    engine.forget_salt("a")
    assert engine.cache_stats()["hot_chunks"] == 0


# Where moved reuse is refused


def test_models_without_rope_say_why_only_exact_hits_serve(tiny_engine) -> None:
    engine = tiny_engine("gpt2")
    engine.warm(prompt_of([0, 1]))
    result = engine.generate(prompt_of([1, 0]), 1, MOVED)
    assert result.moved_tokens == 0
    assert any("learned absolute position" in note for note in result.reuse.notes)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_length_dependent_rope_refuses_moved_reuse_past_its_switch(rope_type) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        model = tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=128)
    else:
        model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=128)
    with make_engine(model) as engine:
        engine.warm([*HEADER, *PASSAGES[0]])
        short = engine.generate([*words(3, 20), *PASSAGES[0], *QUESTION], 1, **ALL)
        assert short.moved_tokens == 40
        long = engine.generate([*words(3, 90), *PASSAGES[0], *QUESTION], 1, **ALL)
        assert long.moved_tokens == 0
        assert any("depends on the prompt's length" in note for note in long.reuse.notes)


def test_auto_computes_moved_text_if_reuse_does_not_pay(engine) -> None:
    engine.warm([*HEADER, *PASSAGES[0]])
    prompt = [*words(3, 5), *PASSAGES[0], *QUESTION]  # 40 moved rows: a probe costs more
    assert engine.generate(prompt, 1, keep=False, **SLOPPY).moved_tokens == 40
    result = engine.generate(prompt, 1)
    assert result.moved_tokens == 0
    assert any("would not have been faster" in note for note in result.reuse.notes)
