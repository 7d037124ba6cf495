"""Why each part of a prompt was or was not reused."""

from __future__ import annotations

import gc
import json
import pickle
import random
import re
import string
import time
import weakref

import pytest

from kvboost import KVBoost, KVBoostError
from kvboost.results import Explanation, Part, Why
from kvboost.results.explanation import duration
from support.tiny import dynamic_model, make_engine, tiny_model

QUERY = {"recompute_strategy": "query"}
"""Moves text, whatever it costs."""


def text(number: int, length: int = 100) -> str:
    """A text of one line that shares nothing with that of another number."""
    return "".join(random.Random(number).choices(string.ascii_letters, k=length))


HEAD = "You are an agent.\nToday is Monday, 10:21.\nBe brief.\n"
BODY = "".join(f"{text(number, 60)}\n" for number in range(3))


@pytest.fixture
def engine():
    """A new one: it remembers what was forgotten."""
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as made:
        yield made
        assert made.check_integrity() == []


def ask(engine: KVBoost, prompt: str, mode: str = "chunk_kv_reuse", **options) -> Explanation:
    return engine.generate(prompt, 1, mode, **{**QUERY, **options}).explain()


def reasons(explanation: Explanation) -> list[tuple[Why, int]]:
    parts = explanation.parts
    assert [part.start for part in parts] == [0, *(part.end for part in parts[:-1])]
    return [(part.why, part.num_tokens) for part in parts]


def of(explanation: Explanation, why: Why) -> Part:
    (found,) = (part for part in explanation.parts if part.why is why)
    return found


def test_a_changed_line_near_the_front_is_named(engine) -> None:
    ask(engine, HEAD + BODY + "Why?")
    changed = HEAD.replace("10:21", "11:45")
    explanation = ask(engine, changed + BODY + "Why?")
    found = explanation.divergence
    assert (found.line, found.row) == (2, changed.index("1:45"))
    assert found.before == "Today is Monday, 1"
    assert (found.prompt, found.cached) == ("1:45.", "0:21.")
    assert found.replaced == (4, 4)
    moved = of(explanation, Why.MOVED)
    assert moved.start == changed.index(".\nBe brief") and moved.distance == 0
    shown = str(explanation)
    assert "at token 36, line 2: 4 tokens in place of 4\n" in shown
    assert "  cached: Today is Monday, 10:21.\n  prompt: Today is Monday, 11:45.\n" in shown
    caret = next(line for line in shown.splitlines() if line.strip() == "^")
    assert caret.index("^") == len("  prompt: Today is Monday, 1")


@pytest.mark.parametrize("row", [0, 16, 20, 48])
def test_texts_may_differ_anywhere_in_chunks(engine, row) -> None:
    """Chunks have 16 tokens: where one ends, the text that follows is another's."""
    engine.warm(text(1, row) + text(2, 80), header="")
    found = ask(engine, text(1, row) + text(3, 80), "prefix_cache").divergence
    assert (found.row, found.line) == (row, 1)
    assert found.cached == text(2, 80)[:48] and found.prompt == text(3, 80)[:48]


def test_an_explanation_goes_through_json(engine) -> None:
    ask(engine, HEAD + BODY)
    explanation = ask(engine, HEAD.replace("10:21", "11:45") + BODY)
    again = Explanation.from_dict(json.loads(json.dumps(explanation.as_dict())))
    assert again == explanation and str(again) == str(explanation)


def test_a_line_that_was_put_in_says_how_far_the_rest_has_moved(engine) -> None:
    ask(engine, HEAD + BODY)
    explanation = ask(engine, HEAD + "A new line.\n" + BODY + "And why?")
    assert explanation.divergence.replaced == (0, 12)
    moved = of(explanation, Why.MOVED)
    assert moved.distance == 12
    assert moved.text.startswith(".\n") and moved.start == len(HEAD) + 10  # as HEAD ends
    assert moved.before_then == HEAD[:-2][-48:]
    assert moved.before_now == (HEAD + "A new line")[-48:]
    assert "10:21.⏎Be brief”, is after “" in str(explanation)
    assert moved.rows_changed == pytest.approx(12, abs=8)
    assert 0 < moved.recomputed < moved.num_tokens
    assert f"{moved.recomputed} rows computed again" in moved.detail
    assert "on by 12" in moved.detail and "on by 12" in str(explanation)
    assert explanation.parts[-1].text.endswith("And why?")
    assert (
        explanation.computed_tokens
        == sum(part.num_tokens for part in explanation.parts if part.kind.value == "compute")
        + moved.recomputed
    )


def test_a_prompt_that_goes_on_where_cached_text_ends_differs_nowhere(engine) -> None:
    engine.warm(HEAD + BODY, header="")
    explanation = ask(engine, HEAD + BODY + "Why?")
    assert explanation.divergence is None
    known = len(HEAD + BODY)
    assert reasons(explanation) == [(Why.PREFIX, known), (Why.NEW, 4)]
    assert ask(engine, HEAD + BODY).parts[-1].why is Why.LAST  # all of it is cached


def test_the_last_rows_are_always_computed(engine) -> None:
    engine.warm(text(1, 200), header="")
    explanation = ask(engine, text(2, 20) + text(1, 200))
    assert reasons(explanation) == [(Why.NEW, 20), (Why.MOVED, 184), (Why.LAST, 16)]


def test_pieces_that_are_too_short_to_move(engine) -> None:
    with make_engine(tiny_model("llama"), chunk_size=8) as fine:  # finds shorter pieces
        fine.warm(text(1, 200), header="")
        explanation = ask(fine, text(2, 20) + text(1, 200)[80:110] + text(3, 40))
        assert reasons(explanation) == [(Why.NEW, 20), (Why.SHORT, 30), (Why.NEW, 40)]
        assert "fewer than 32 tokens" in of(explanation, Why.SHORT).detail
        assert ask(fine, text(1, 10) + text(4, 40)).parts[0].why is Why.SHORT


def test_own_past_over_moved_text(engine) -> None:
    engine.warm(BODY, header="")
    with engine.stream("Read.\n" + BODY + "Why?", 4, **QUERY, heal="off") as stream:
        list(stream)
    again = "Read.\n" + BODY + "Why?" + text(9, 40)
    assert Why.PAST in dict(reasons(ask(engine, again)))


def test_text_that_was_forgotten_says_since_when(engine) -> None:
    engine.warm(HEAD + BODY, header="")
    engine.forget(BODY)
    explanation = ask(engine, HEAD + BODY)
    gone = of(explanation, Why.GONE)
    assert gone.start <= len(HEAD) and gone.end == len(HEAD + BODY)
    assert gone.detail == "was cached, forgotten 0 s before this prompt"
    assert Why.GONE not in dict(reasons(ask(engine, HEAD + BODY)))  # read again since


def test_text_that_was_evicted() -> None:
    with make_engine(tiny_model("llama"), max_cache_bytes=200_000) as small:
        small.warm(text(1, 200), header="")
        for number in range(2, 40):
            small.warm(text(number, 200), header="")
        explanation = ask(small, text(1, 200) + "Why?")
        assert "evicted" in of(explanation, Why.GONE).detail


def test_a_longer_chunk_that_replaces_a_shorter_one_is_no_loss(engine) -> None:
    engine.warm(HEAD[:40], header="")
    engine.warm(HEAD, header="")
    assert engine.runtime.store.holdings.departed.until(time.time()) == []


def test_moving_that_would_not_be_faster_names_both_costs(engine, monkeypatch) -> None:
    engine.warm(BODY, header="")
    prompt = "Read.\n" + BODY + "Why?"
    auto = {"recompute_strategy": "auto"}
    monkeypatch.setattr("kvboost.reuse.cost.WORTHWHILE_RATIO", 0.0)
    slower = of(ask(engine, prompt, keep=False, **auto), Why.SLOWER)
    assert slower.num_tokens == len(BODY) - 12
    assert re.search("(rows|ms) expected for the prompt, against", slower.detail)
    monkeypatch.undo()
    forced = ask(engine, prompt, **auto, reuse_moved="always")
    assert Why.SLOWER not in dict(reasons(forced))


@pytest.mark.parametrize("options", [{"mode": "prefix_cache"}, {"exactness": "verified"}])
def test_a_mode_that_does_not_move_text(engine, options) -> None:
    engine.warm(BODY, header="")
    explanation = ask(engine, "12345\n" + BODY + text(5, 40), **options)
    assert reasons(explanation)[1:] == [(Why.MODE, len(BODY)), (Why.NEW, 40)]
    assert "prefix_cache" in of(explanation, Why.MODE).detail


def test_text_that_a_prompt_repeats_is_new(engine) -> None:
    """Its first copy is cached only afterwards."""
    explanation = ask(engine, text(1, 80) + text(1, 80), "prefix_cache")
    assert reasons(explanation) == [(Why.NEW, 160)]


def test_without_reuse_nothing_is_looked_for(engine) -> None:
    engine.warm(BODY, header="")
    assert reasons(ask(engine, BODY, "baseline")) == [(Why.MODE, len(BODY))]


def test_a_model_that_cannot_rotate_keys() -> None:
    with make_engine(tiny_model("gpt2"), strict=False) as fixed:
        fixed.warm(text(1), header="")
        explanation = ask(fixed, text(2, 20) + text(1) + text(3, 40))
        assert reasons(explanation) == [(Why.NEW, 20), (Why.MODEL, 100), (Why.NEW, 40)]


def test_a_model_whose_rotation_depends_on_the_length() -> None:
    with make_engine(dynamic_model()) as dynamic:
        assert reasons(ask(dynamic, text(1))) == [(Why.MODEL, 100)]


def test_text_under_another_salt_is_named_unless_that_is_left_out(engine) -> None:
    engine.warm(text(1), header="", cache_salt="ann")
    report = engine.plan(text(1) + text(2, 40), cache_salt="bob")
    assert reasons(report.explain()) == [(Why.SALT, 100), (Why.NEW, 40)]
    assert reasons(report.explain(other_salts=False)) == [(Why.NEW, 140)]
    assert report.explain().divergence is None


def test_no_side_of_a_divergence_is_of_another_salt(engine) -> None:
    engine.warm("secret: 4711\n" + BODY, header="", cache_salt="ann")
    explanation = ask(engine, "secret: 1234\n" + BODY, cache_salt="bob")
    assert explanation.divergence is None
    assert "4711" not in str(explanation) + str(explanation.as_dict())


def test_a_plan_gives_the_same_explanation(engine) -> None:
    ask(engine, HEAD + BODY + "Why?")
    changed = HEAD.replace("10:21", "11:45") + BODY + "Why?"
    planned = engine.plan(changed, **QUERY).explain()
    served = ask(engine, changed)
    assert planned.divergence == served.divergence
    assert reasons(planned) == reasons(served)


def test_what_is_shown_has_no_controls_of_a_terminal(engine) -> None:
    ask(engine, "a\x1b[2Jb" + text(1))
    shown = str(ask(engine, "a\x1b[2Jc" + text(1)))
    assert "\x1b" not in shown and "·[2J" in shown


def test_a_result_can_be_pickled_and_keeps_no_engine_alive() -> None:
    engine = make_engine(tiny_model("llama"))
    result = engine.generate(text(1), 1)
    store = weakref.ref(engine.runtime.store)
    engine.close()
    del engine
    assert reasons(result.explain()) == [(Why.NEW, 100)]
    gc.collect()
    assert store() is None
    assert reasons(result.explain()) == [(Why.NEW, 100)]
    copy = pickle.loads(pickle.dumps(result))
    assert copy == result
    with pytest.raises(KVBoostError, match="nothing to explain here"):
        copy.explain()


def test_an_explanation_costs_a_request_nothing_per_chunk(engine, monkeypatch) -> None:
    """Neither text nor chunks are looked at until someone asks."""
    decoded = []
    monkeypatch.setattr(engine.runtime.planner, "_decode", lambda ids: decoded.append(ids) or "")
    report = engine.plan(HEAD)
    assert decoded == [] and len(report.facts.follows) == 0
    report.explain()
    assert decoded


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (150, "2 min"), (7300, "2 h"), (2e5, "2 days")]
)
def test_ages_in_words(seconds, said) -> None:
    assert duration(seconds) == said
