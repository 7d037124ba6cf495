from __future__ import annotations

import pytest
import torch

from kvboost import KVBoost
from kvboost.config import MOST_RECOMPUTED, RepairParams
from kvboost.errors import ConfigError
from kvboost.results import Score, kl_divergence
from kvboost.reuse import repair
from kvboost.reuse.rounds import divergence
from support.prompts import BASELINE, HEADER, PASSAGES, prompt_of, words
from support.tiny import make_engine, tiny_model

PROMPT, ANSWER = prompt_of([3, 1, 0, 2]), words(5, 6)


@pytest.fixture
def warmed():
    with make_engine(tiny_model("llama")) as engine:
        for passage in PASSAGES:
            engine.warm([*HEADER, *passage])
        yield engine


def score(engine: KVBoost, tolerance: float, prompt: list[int] = PROMPT, ratio: float = 0.2):
    return engine.score(
        prompt, ANSWER, recompute_ratio=ratio, recompute_tolerance=tolerance, reuse_moved="always"
    )


def recomputed(scored: Score) -> int:
    return len(scored.reuse.recomputed)


def test_a_second_round_is_run_if_the_expected_kl_exceeds_the_tolerance(warmed) -> None:
    full = warmed.score(PROMPT, ANSWER, BASELINE).logits
    once, again, most = (score(warmed, tolerance) for tolerance in (1e6, 0.0, 0.0))
    moved = sum(span.num_tokens for span in once.reuse.spans if span.kind == "moved")
    assert round(0.2 * repair.LEAST_BUDGET * moved) <= recomputed(once) <= round(0.4 * moved)
    assert recomputed(most) == round(MOST_RECOMPUTED * moved)
    assert set(once.reuse.recomputed) < set(most.reuse.recomputed)
    assert torch.equal(again.logits, most.logits)  # the same every time
    far, near = (kl_divergence(full, one.logits).mean() for one in (once, most))
    assert near < far
    assert once.reuse.expected_kl > most.reuse.expected_kl > 0
    same = score(warmed, once.reuse.expected_kl)
    assert recomputed(same) == recomputed(once)


def test_a_second_round_has_as_many_rows_as_the_tolerance_asks_for(warmed, monkeypatch) -> None:
    once, most = score(warmed, 1e6), score(warmed, 0.0)
    within = score(warmed, 1.01 * most.reuse.expected_kl)
    assert within.reuse.expected_kl <= 1.01 * most.reuse.expected_kl
    assert recomputed(once) < recomputed(within) <= recomputed(most)
    monkeypatch.setattr(repair, "MOST_BUDGET", 1.0)
    first = score(warmed, 1e6)
    little = score(warmed, 0.99 * first.reuse.expected_kl)
    assert recomputed(little) == 2 * recomputed(first)  # fewer would not be worth a forward


def test_a_second_round_is_charged_with_the_rows_of_the_question(warmed) -> None:
    once, most = score(warmed, 1e6), score(warmed, 0.0)
    tail = once.reuse.charged_tokens - recomputed(once)  # probed through all layers
    assert tail == int(tail) > 0
    assert most.reuse.charged_tokens == recomputed(once) + recomputed(most) + 2 * tail
    assert 0 < once.reuse.charged_flops < most.reuse.charged_flops


def test_new_text_before_the_question_leaves_nothing_to_compare_with(warmed) -> None:
    new = [*HEADER, *PASSAGES[1], *words(40, 17), *PASSAGES[3], *words(20, 18)]
    strict, loose = score(warmed, 0.0, new), score(warmed, 1e6, new)
    assert recomputed(strict) == recomputed(loose) > 0
    assert strict.reuse.expected_kl is None


def test_a_question_that_is_long_beside_the_moved_text_has_one_round(warmed) -> None:
    assert recomputed(score(warmed, 0.0, ratio=0.05)) == recomputed(score(warmed, 1e6, ratio=0.05))


def test_only_auto_takes_rounds() -> None:
    assert RepairParams("auto", 0.15, tolerance=0.1).takes_rounds
    assert not RepairParams("auto", 0.15).takes_rounds
    assert not RepairParams("query", 0.15, tolerance=0.1).takes_rounds
    for ratio in (0.5, 0.0):
        assert not RepairParams("auto", ratio, tolerance=0.1).takes_rounds
    with pytest.raises(ConfigError, match="recompute_tolerance=-1"):
        RepairParams(tolerance=-1)


def test_the_change_is_a_divergence() -> None:
    one, other = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 3.0, 0.0])
    assert divergence(one, one) == 0
    assert divergence(one, other) == pytest.approx(float(kl_divergence(one, other)), rel=1e-5)
