"""Requests over moved text become exact while they answer, in steps over pages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from kvboost import KVBoost
from kvboost.model import triton
from kvboost.model.execution.segment import Segment
from support.healed import SLOPPY, num_exact
from support.paged_engines import TWO_LAYERS, forward_of, leaks, paged_engine, steps_of
from support.prompts import BASELINE, HEADER, PASSAGES, QUESTION, words
from support.tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from kvboost.model.paged.step_batch import JoinedBatch, StepBatch, batch_of
from support.torch_kernels import use_torch_kernels

ROWS = 16
IN_STEPS = {**SLOPPY, "heal": "auto"}
PROMPT = [*words(4, 5), *PASSAGES[1], *QUESTION]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVBoost]:
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)
    with paged_engine(monkeypatch, "phi3", sizes=TWO_LAYERS) as made:
        monkeypatch.setattr("kvboost.reuse.paged.beside.ROWS", ROWS)
        made.warm([*HEADER, *PASSAGES[1]])
        yield made
        made.heal()  # the loop may be at it
        assert leaks(made) == [] and made.check_integrity() == []


def test_from_the_catch_up_on_the_answer_is_that_of_exact_rows(engine: KVBoost) -> None:
    result = engine.generate(PROMPT, 10, **IN_STEPS)
    assert result.moved_tokens > 30
    healed_in_steps = steps_of(engine).num_rows_beside
    assert healed_in_steps > 30, "no step computed rows beside its own"
    first = result.answer_exact_from
    assert 1 < first < 8
    before_catch_up = first - 1
    assert steps_of(engine).num_ahead >= before_catch_up - 1, "the GPU waits for each token"
    sure = [*PROMPT, *result.token_ids[:first]]
    exact = engine.generate(sure, 10 - first, BASELINE, ignore_eos=True)
    assert result.token_ids[first:] == exact.token_ids
    healing = result.healing
    assert healing is not None and healing.status == "done" and healing.audit is not None
    assert healing.healed_tokens == len(PROMPT) + first - 5  # all after the five exact ones
    assert healing.audit.compared_tokens == first
    assert num_exact(engine, [*PROMPT, *result.token_ids]) == len(PROMPT) + 9


def test_the_row_of_a_step_attends_with_those_beside_it(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives what it gives if it attends by itself."""
    batches: list[type] = []

    def answer(make: Callable[..., object], salt: str) -> tuple[list[int], int]:
        def making(*args: object, **options: object) -> object:
            batch = make(*args, **options)
            batches.append(type(batch))
            return batch

        monkeypatch.setattr("kvboost.model.paged.steps.batch_of", making)
        steps_of(engine).forget_graphs()
        engine.warm([*HEADER, *PASSAGES[1]], cache_salt=salt)
        result = engine.generate(PROMPT, 8, cache_salt=salt, **IN_STEPS)
        return result.token_ids, result.answer_exact_from

    joined = answer(batch_of, "joined")
    assert JoinedBatch in batches and 1 < joined[1] < 8
    batches.clear()
    apart = answer(StepBatch, "apart")
    assert JoinedBatch not in batches and apart == joined


def test_cancelled_anywhere_only_rows_before_the_frontier_are_exact(engine: KVBoost) -> None:
    chance = random.Random(5)
    ends = set()
    for number in range(5):
        salt = f"cancelled {number}"
        engine.warm([*HEADER, *PASSAGES[1]], cache_salt=salt)
        with engine.stream(PROMPT, 9, cache_salt=salt, **IN_STEPS) as stream:
            for _ in range(chance.randrange(1, 6)):
                next(stream, None)
        result = stream.result
        ends.add(num_exact(engine, [*PROMPT, *result.token_ids], salt))
    assert len(ends) > 1 and max(ends) > 5 + ROWS


def test_in_a_batch_one_request_heals_at_a_time_and_none_while_another_reads(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, seen = forward_of(engine), []
    run = forward.run

    def running(segments: list[Segment]) -> list[torch.Tensor]:
        seen.append([segment.beside is not None for segment in segments])
        return run(segments)  # type: ignore[return-value]

    monkeypatch.setattr(forward, "run", running)
    other = [*PROMPT[:5], *PASSAGES[1][:40], *QUESTION]
    results = engine.generate_batch([PROMPT, other], 9, **IN_STEPS)
    assert max(map(sum, seen)) == 1, "two requests had rows beside one step"
    assert any(len(step) == 2 and sum(step) for step in seen)
    for prompt, result in zip([PROMPT, other], results, strict=True):
        num_exact(engine, [*prompt, *result.token_ids])
    assert results[0].answer_exact_from < 9


@pytest.mark.parametrize("heal", ["idle", "off"])
def test_only_auto_heals_in_steps(heal: str, engine: KVBoost) -> None:
    result = engine.generate(PROMPT, 3, **{**SLOPPY, "heal": heal})
    assert result.moved_tokens > 30 and result.answer_exact_from == 3
    assert steps_of(engine).num_rows_beside == 0
