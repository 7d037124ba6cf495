"""Which conversation is healed first, and which no more."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvboost import KVBoost, SpanKind
from kvboost.runtime import healing, idle_work
from support.healed import SLOPPY, heal_until, num_exact, warmed
from support.prompts import BASELINE, HEADER, MOVED, PASSAGES, prompt_of, words
from support.tiny import make_engine, tiny_model

FULL: dict[str, Any] = {**SLOPPY, "recompute_strategy": "query", "recompute_ratio": 1.0}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVBoost]:
    monkeypatch.setattr(healing, "SLICE_ROWS", 16)
    model = tiny_model("llama", max_position_embeddings=1024)
    with warmed(make_engine(model, reuse_moved="always")) as made:
        yield made
        assert made.check_integrity() == []


def after_slices(count: int) -> Callable[[], bool]:
    """Interrupts healing in the middle of the next slice. The model has three layers."""
    layers = itertools.count()
    return lambda: next(layers) > 3 * count


def num_rows(result, *kinds: SpanKind) -> int:
    return sum(span.num_tokens for span in result.spans if span.kind in kinds)


def test_the_conversation_that_was_used_last_is_healed_first(engine) -> None:
    first, second, third = (
        engine.generate(prompt_of(o), 2, **SLOPPY) for o in ([3, 1], [1, 2], [2, 0])
    )
    again = engine.generate(words(5, 60), 2, **SLOPPY)  # exact: it takes nobody's place
    assert again.healing is None
    for healed in (third, second, first):
        waiting = [one for one in (first, second, third) if one.healing.status == "waiting"]
        heal_until(engine, after_slices(1))
        assert waiting[-1].healed_tokens > 0, "it was begun, and is the first to go on"
        heal_until(engine, lambda: False)
        assert healed.healing.status == "done" and healed.healing.audit is not None


def test_the_next_turn_is_healed_in_place_of_the_last_one(engine) -> None:
    prompt = prompt_of([3, 1])
    first = engine.generate(prompt, 4, **SLOPPY)
    other = engine.generate(prompt_of([2, 0]), 4, **SLOPPY)
    follow = [*prompt, *first.token_ids, *words(9, 40)]
    second = engine.generate(follow, 4, **SLOPPY)
    assert [one.healing.status for one in (first, other, second)] == [
        "replaced",
        "waiting",
        "waiting",
    ]
    assert first.healing.audit is None and first.healed_tokens == 0
    report = engine.heal()
    assert report.conversations == 2 and report.waiting == 0
    assert report.tokens == second.healed_tokens + other.healed_tokens
    stats = engine.cache_stats()
    assert stats["healing"]["replaced"] == stats["audit"]["replaced"] == 1
    assert stats["audit"]["audited"] == stats["healing"]["healed"] == 2
    ids = [*follow, *second.token_ids]
    assert num_exact(engine, ids) == len(ids) - 1 > len(prompt) + 4


def test_text_before_an_edit_is_not_healed_for_nothing(engine) -> None:
    prompt = prompt_of([3, 1, 2])
    first = engine.generate(prompt, 4, **SLOPPY)
    edited = [*words(50, 6), *prompt[4:], *first.token_ids, *words(9, 30)]
    second = engine.generate(edited, 4, **SLOPPY)
    assert first.healing.status == "replaced"
    assert engine.heal().tokens == second.healed_tokens
    ids = [*prompt, *first.token_ids]
    assert num_exact(engine, ids) == first.exact_tokens, "nothing more of it was read"


def test_a_turn_that_comes_while_the_last_one_is_healed_replaces_it_too(engine) -> None:
    prompt = prompt_of([3, 1])
    first = engine.generate(prompt, 4, **SLOPPY)
    one = engine.runtime.idle_work.take()
    ids = [*prompt, *first.token_ids]
    others = [engine.generate([*ids, *words(n, 60)], 4, **SLOPPY) for n in (8, 9)]
    assert first.healing.status == "waiting"
    engine.runtime.idle_work.put_back(one)
    statuses = [turn.healing.status for turn in (first, *others)]
    assert statuses == ["replaced", "waiting", "waiting"]
    assert engine.heal().conversations == 2
    assert engine.cache_stats()["healing"]["replaced"] == 1


@pytest.mark.parametrize("options", [{"heal": "off"}, {"exactness": "verified"}])
def test_a_turn_that_is_not_to_be_healed_replaces_the_last_one_too(engine, options) -> None:
    prompt = prompt_of([3, 1])
    first = engine.generate(prompt, 4, **SLOPPY)
    engine.generate([*prompt, *first.token_ids, *words(9, 40)], 4, **{**SLOPPY, **options})
    assert first.healing.status == "replaced" and engine.heal().conversations == 0


def test_another_salt_replaces_nothing(engine) -> None:
    warmed(engine, "b")
    first = engine.generate(prompt_of([3, 1]), 4, **SLOPPY)
    engine.generate(prompt_of([3, 1]), 4, **SLOPPY, cache_salt="b")
    assert first.healing.status == "waiting" and engine.heal().conversations == 2


def test_what_was_used_longest_ago_is_dropped(engine, monkeypatch) -> None:
    monkeypatch.setattr(idle_work, "MOST_CONVERSATIONS", 2)
    first, second = (engine.generate(prompt_of(order), 2, **SLOPPY) for order in ([3, 1], [1, 2]))
    follow = [*prompt_of([3, 1]), *first.token_ids, *words(9, 40)]
    engine.generate(follow, 2, **SLOPPY)  # the first conversation is used again
    third = engine.generate(prompt_of([2, 0]), 2, **SLOPPY)
    statuses = [one.healing.status for one in (first, second, third)]
    assert statuses == ["replaced", "dropped", "waiting"]


def test_a_turn_finds_exact_rows_as_far_as_healing_got(engine) -> None:
    prompt = prompt_of([3, 1, 0, 2])
    first = engine.generate(prompt, 4, **FULL)
    heal_until(engine, after_slices(4))
    ids = [*prompt, *first.token_ids]
    frontier = num_exact(engine, ids)
    assert first.exact_tokens < frontier == first.exact_tokens + first.healed_tokens < len(prompt)
    follow = [*ids, *words(9, 40)]
    second = engine.generate(follow, 6, MOVED, **FULL)
    assert second.exact_tokens == frontier
    assert second.spans[0].kind is SpanKind.EXACT
    assert num_rows(second, SpanKind.APPROXIMATE) == len(ids) - 1 - frontier
    full = engine.generate(follow, 6, BASELINE, ignore_eos=True)
    assert second.token_ids == full.token_ids
    assert first.healing.status == "replaced"
    engine.heal()  # goes on from the rows that the first turn's healing has left
    assert second.healed_tokens == len(follow) + 5 - frontier


def test_an_agent_that_edits_its_history_at_every_turn_stays_exact(engine) -> None:
    """Each turn changes a note near the front, and everything after it moves. Between the turns,
    while the client runs its tool, the conversation is healed."""
    task, history = words(20, 40), [*PASSAGES[0], *PASSAGES[1]]
    for turn in range(5):
        note = words(30 + turn, 10 + turn)
        prompt = [*HEADER, *note, *task, *history, *words(60 + turn, 12)]
        result = engine.generate(prompt, 6, MOVED, **FULL)
        assert num_rows(result, SpanKind.APPROXIMATE) == 0, turn
        full = engine.generate(prompt, 6, BASELINE, ignore_eos=True)
        assert result.token_ids == full.token_ids, turn
        assert engine.heal().conversations == (1 if result.moved_tokens else 0)
        said = [*prompt, *result.token_ids]
        assert num_exact(engine, said) == len(said) - 1
        history += [*prompt[-12:], *result.token_ids, *words(80 + turn, 20)]
    new = len(note) + 12 + 20
    assert result.moved_tokens >= len(prompt) - len(HEADER) - new - 32
    assert not any(chunk["lineage"] == "approximate" for chunk in engine.chunks(1000))
