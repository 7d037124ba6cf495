"""Drafts are as long as pays."""

from __future__ import annotations

import pytest

from kvboost.model.paged.draft_steps import counted_rows
from kvboost.reuse.cost import CostModel, unpadded
from kvboost.runtime.speculation.lengths import CHEAP, NO_DRAFT, SURE, Chances, Pauses, best_pace


def test_unlikely_drafts_are_short_and_hopeless_ones_are_none() -> None:
    def step(length: int) -> float:
        return 1.0 + 0.1 * length

    paces = [best_pace([chance] * 32, step) for chance in (0.05, 0.4, 0.7, 0.9, 0.97)]
    lengths = [pace.length for pace in paces]
    assert lengths[0] == 0 and lengths == sorted(lengths) and lengths[-1] >= 11
    assert paces[0].tokens == 1.0 and 9 < paces[-1].tokens < 1 + lengths[-1]


def test_a_doubtful_beginning_may_be_worth_a_long_draft() -> None:
    def step(length: int) -> float:
        return 1.0 + 0.05 * length

    assert best_pace([0.5] + [0.99] * 15, step).length == 16
    assert best_pace([0.5] * 16, step).length < 8


def test_time_to_draft_and_other_requests_count() -> None:
    def step(length: int) -> float:
        return 1.0 + 0.05 * length

    alone = best_pace([0.8] * 16, step)
    assert best_pace([0.8] * 16, step, drafting=0.2).length < alone.length
    assert best_pace([0.8] * 16, step, other_tokens=30).length == 0  # rows cost what they give


def test_in_a_batch_drafts_end_before_doubtful_tokens() -> None:
    chances = [0.9, 0.9, (SURE - 0.01) / 0.81, 0.99]  # the third is reached in less than SURE

    def step(length: int) -> float:
        return 1.0 + 0.05 * length

    assert SURE < 8 * CHEAP * 0.05
    assert best_pace(chances, step, other_tokens=7).length == 2
    assert best_pace([0.9, 0.9, 0.9, 0.99], step, other_tokens=7).length == 4
    assert best_pace(chances, step).length == 4  # alone
    assert best_pace(chances, lambda length: 1.0, other_tokens=7).length == 4  # rows are free


def test_a_longer_draft_pays_for_what_it_takes_more() -> None:
    def step(length: int) -> float:  # of a processor that multiplies twelve rows at once
        return 155.0 if length == 0 else 182.0 if length <= 4 else 182.0 + 25.0 * (length - 4)

    longer = best_pace([0.98] * 11, step, other_tokens=7)
    assert longer.length == 3 and longer.tokens < 4
    # Seven together would give more tokens in the same time than none.
    assert (7 + 1 + sum(0.98**count for count in range(1, 8))) / step(7) > 8 / 155.0


def test_a_draft_pays_although_others_have_long_ones() -> None:
    def step(length: int) -> float:  # 8 requests, of which 7 draft 8 tokens each
        return 168.0 + 4.0 * (56 + length)

    others = 7 * 7.6
    pace = best_pace([0.97] * 8, step, others)
    assert pace.length == 5 and 1 < pace.gain < 1.04
    assert best_pace([0.76] * 8, step, others) == NO_DRAFT


def test_a_step_that_was_launched_ahead_makes_the_first_draft_dearer() -> None:
    def step(length: int) -> float:  # eight requests; steps with drafts wait for the host
        return 2.2 if length == 0 else 3.8

    assert best_pace([0.7] * 8, step, 7.0, is_ahead=True) == NO_DRAFT
    assert best_pace([0.99] * 23, step, 7.0, is_ahead=True).length == 23
    # Others would draft as well.
    assert best_pace([0.7] * 8, step, 7.0, is_ahead=True, promised=6 * 2.2).length == 8


def test_what_repeats_nothing_is_looked_up_less_often() -> None:
    pauses = Pauses()

    def looks(steps: int, promised: float) -> int:
        count = 0
        for _ in range(steps):
            if pauses.is_over(accepted=0):
                count += 1
                pauses.looked(promised)
        return count

    assert looks(4, 0.0) == 4 and looks(200, 0.1) < 40
    assert looks(9, 3.0) >= 1 and looks(10, 3.0) == 10
    assert looks(200, 0.0) < 40
    assert pauses.is_over(accepted=1)  # a draft was right


def test_steps_with_drafts_over_pages_are_learned_apart() -> None:
    cost = CostModel(0.0)
    cost.plain_rows, cost.drafted_rows = unpadded, counted_rows
    for _ in range(3):
        cost.observe_step(8, 1.0)  # eight requests
        cost.observe_step(5, 3.0, drafted=True)  # one with a draft; both are padded to eight rows
    assert cost.step(8, 0) == 1.0
    assert cost.step(2, 0, drafted=True) == cost.step(8, 0, drafted=True) == 3.0


def test_chances_are_learned_and_shared() -> None:
    everyone = Chances(weight=16)
    one = Chances(4, everyone)
    assert one.of("text", 0.5) == 0.5
    for _ in range(40):
        one.observe("text", True)
    assert one.of("text", 0.5) > 0.95
    assert everyone.of("text", 0.5) > 0.8
    assert Chances(4, everyone).of("text", 0.5) > 0.8
    assert one.of("model", 0.5) == 0.5


def test_a_step_costs_what_it_cost() -> None:
    cost = CostModel(1e-4)
    assert cost.step(2, 10) > cost.step(1, 10)  # until something is known: the model's arithmetic
    for _ in range(3):
        cost.observe_step(1, 1.0)
        cost.observe_step(9, 1.8)
    cost.observe_step(9, 50.0)  # an outlier
    assert cost.step(1, 10) == 1.0 and cost.step(9, 10) == pytest.approx(1.8)
    assert cost.step(5, 10) == pytest.approx(1.4)
    assert cost.step(18, 10) > 1.8
