"""Scores: a request goes where its text was read, unless another upstream is done sooner."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.deploy.content import MARK_TOKENS, NOTHING, Sketch
from kvboost.deploy.router import Known, Recent, Router, RouterSettings
from kvboost.errors import ConfigError
from support.passages import of, text


def make(*names: str, **settings: object) -> Router:
    return Router(names or ("a", "b"), RouterSettings(**settings))


def go(router: Router, sketch: Sketch, among: tuple[str, ...] = ("a", "b")) -> tuple[str, str]:
    """Sends a request and has it answered; where it went, and why."""
    best = router.rank(sketch, among)[0]
    router.send(best, sketch).end(was_read=True)
    return best.upstream, best.reason


def test_new_text_is_spread_and_comes_back_to_where_it_was_read() -> None:
    router = make()
    first = {number: go(router, of(text(number))) for number in range(12)}
    assert {reason for _, reason in first.values()} == {"new"}
    assert sorted(Counter(name for name, _ in first.values()).values()) == [6, 6]
    for number in random.Random(0).sample(range(12), 12):
        again = go(router, of(f"{text('x' + str(number), 20)} {text(number)} Why?"))
        assert again == (first[number][0], "content")


def test_a_conversation_stays_where_its_beginning_is() -> None:
    router = make()
    said = text("system")
    name, _ = go(router, of(said))
    for turn in range(4):
        said += f"\n{text(turn, 60)}"
        assert go(router, of(said)) == (name, "beginning")


def test_upstreams_that_reuse_prefixes_only_get_no_credit_for_passages() -> None:
    router = make(policy="beginning")
    go(router, of(text(1)))
    choice = router.rank(of(f"other words {text(1)}"), ("a", "b"))[0]
    assert (choice.reason, choice.expected.elsewhere) == ("new", 0)
    assert go(router, of(f"{text(1)} Why?"))[1] == "beginning"


def test_a_request_that_reuses_nothing_is_spread_and_leaves_nothing() -> None:
    router = make()
    baseline = of(text(1), kvboost={"mode": "baseline"})
    assert [go(router, baseline) for _ in range(2)] == [("a", "new"), ("b", "new")]
    assert router.known("a").tokens == 0
    go(router, of(text(1)))
    exact_only = of(f"y {text(1)}", kvboost={"mode": "prefix_cache"})
    assert router.rank(exact_only, ("a", "b"))[0].reason == "new"


def test_a_busy_upstream_is_left_when_waiting_costs_more_than_reading() -> None:
    router = make()
    document = of(text(1, 300))
    name, _ = go(router, document)
    (other,) = {"a", "b"} - {name}
    big = of(text(2, 6000))
    waiting = router.send(router.rank(big, (name,))[0], big)
    assert router.rank(document, ("a", "b"))[0].upstream == other
    assert router.rank(document, ("a", "b"))[0].reason == "load"
    waiting.answering()  # its prompt is read: only its tokens are still to come
    assert router.rank(document, ("a", "b"))[0].upstream == name
    waiting.end(was_read=True)
    assert router.open_requests(name) == 0


@pytest.mark.parametrize("words", [20, 2000])
def test_an_open_request_costs_what_it_has_to_read_or_the_least_and_not_both(words: int) -> None:
    router, asked, other = make("a"), of(text(1)), of(text(2, words))

    def score() -> float:
        return router.rank(asked, ("a",))[0].score

    idle = score()
    flight = router.send(router.rank(other, ("a",))[0], other)
    assert idle - score() == max(64, 0.25 * other.tokens)
    flight.answering()
    assert idle - score() == 64
    flight.end(was_read=True)
    assert score() == idle


def test_requests_without_a_prompt_go_to_the_least_busy() -> None:
    router = make("a", "b", "c")
    names = ("a", "b", "c")
    flights = [router.send(router.rank(NOTHING, names)[0]) for _ in range(6)]
    assert Counter(flight.upstream for flight in flights) == {"a": 2, "b": 2, "c": 2}
    for flight in flights:
        if flight.upstream == "b":
            flight.end(was_read=True)
            flight.end(was_read=True)  # twice changes nothing
    assert router.rank(NOTHING, names)[0].upstream == "b" and router.open_requests("b") == 0


def test_a_shared_system_prompt_does_not_keep_all_text_on_one_upstream() -> None:
    router, system = make(), text("system", 100)
    went = Counter(go(router, of(f"{system} {text(number)}"))[0] for number in range(40))
    assert min(went.values()) >= 12


def test_what_was_not_read_is_not_known() -> None:
    router = make()
    sketch = of(text(1))
    flight = router.send(router.rank(sketch, ("a", "b"))[0], sketch)
    assert router.known("a").expect(sketch).new < sketch.tokens / 4
    flight.end(was_read=False)
    assert router.known("a").expect(sketch).new == sketch.tokens
    go(router, sketch, ("a",))
    flight = router.send(router.rank(sketch, ("a",))[0], sketch)
    flight.end(was_read=False)  # it was there before, and still is
    assert router.known("a").expect(sketch).beginning > 0


def test_an_upstream_that_lost_its_memory_is_not_preferred() -> None:
    router = make()
    name, _ = go(router, of(text(1)))
    router.forget(name)
    assert go(router, of(text(1)))[1] == "new"


def test_the_last_one_left_gets_everything_and_the_ranks_are_complete() -> None:
    router = make("a", "b", "c")
    ranks = router.rank(of(text(1)), ("a", "b", "c"))
    assert sorted(one.upstream for one in ranks) == ["a", "b", "c"]
    assert [one.reason for one in ranks] == ["new", "retry", "retry"]
    assert [(one.upstream, one.reason) for one in router.rank(NOTHING, ("c",))] == [("c", "only")]
    assert router.rank(NOTHING, ()) == []


def test_round_robin_takes_turns_whatever_the_text() -> None:
    router = make(policy="round-robin")
    same = of(text(1))
    assert [go(router, same) for _ in range(3)] == [("a", "turn"), ("b", "turn"), ("a", "turn")]


def test_tenants_do_not_see_each_other() -> None:
    router = make()
    name, _ = go(router, of(text(1), b"ann"))
    choice = router.rank(of(text(1), b"bob"), ("a", "b"))[0]
    assert choice.reason == "new" and choice.expected.new == of(text(1)).tokens
    assert go(router, of(text(1), b"ann"))[0] == name


def test_expectations_are_close_to_the_truth() -> None:
    known = Known(1 << 20)
    known.add(of(f"{text('head', 100)} {text(1)}"))
    prompt = of(f"{text('head', 100)} {text(2)} {text(1)}")
    seen = known.expect(prompt)
    third = prompt.tokens / 9  # 100, 400 and 400 words
    assert seen.beginning == pytest.approx(third, abs=64)
    assert seen.elsewhere == pytest.approx(4 * third, rel=0.2)
    assert seen.beginning + seen.elsewhere + seen.new == prompt.tokens


def test_memory_is_bounded_and_forgets_what_was_used_longest_ago() -> None:
    recent = Recent(3)
    assert recent.add([1, 2, 3]) == [1, 2, 3]
    assert recent.add([1, 4]) == [4]
    assert [one in recent for one in (1, 2, 3, 4)] == [True, False, True, True]
    assert recent.newest(2) == [1, 4] and recent.newest(0) == [] and len(recent) == 3
    router = make(remember_tokens=1600)
    for number in range(20):
        go(router, of(text(number)))
    assert router.known("a").tokens <= 1600


def test_the_router_learns_how_much_an_upstream_keeps() -> None:
    known = Known(200_000)
    for number in range(80):
        known.add(of(text(number)))
    full = known.tokens
    assert full > 30_000
    known.learn(100, 0)  # too little to say anything
    assert known.tokens == full
    for _ in range(30):
        known.learn(1000, 0)
    assert known.tokens == pytest.approx(16 * 1024, abs=MARK_TOKENS)
    assert known.expect(of(text(79))).beginning > 0  # the newest stays
    limit = known.marks.limit
    known.learn(1000, 900)
    assert known.marks.limit > limit
    for _ in range(1000):
        known.learn(1000, 900)
    assert known.marks.limit == 200_000 // MARK_TOKENS


def test_text_that_is_still_being_read_says_nothing_about_the_cache() -> None:
    router = make("a", remember_tokens=200_000)
    long, limit = of(text(1)), router.known("a").marks.limit
    flights = [router.send(router.rank(long, ("a",))[0], long) for _ in range(4)]
    for flight in flights:
        flight.answering()
        flight.found(0)
        flight.end(was_read=True)
    assert router.known("a").marks.limit == limit
    flight = router.send(router.rank(long, ("a",))[0], long)
    flight.found(0)
    flight.end(was_read=True)
    assert router.known("a").marks.limit < limit


@pytest.mark.parametrize(
    "settings", [{"policy": "best"}, {"remember_tokens": 3}, {"request_tokens": -1}]
)
def test_mistakes_are_named(settings) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        RouterSettings(**settings)
    with pytest.raises(ConfigError, match="given twice"):
        make("a", "a")


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=40))
def test_counts_return_to_zero(requests) -> None:
    router = make()
    flights = []
    for number, answered, ended in requests:
        sketch = of(text(number, 60))
        flight = router.send(router.rank(sketch, ("a", "b"))[0], sketch)
        if answered:
            flight.answering()
        if ended:
            flight.end(was_read=answered)
        else:
            flights.append(flight)
    for flight in flights:
        flight.end(was_read=True)
    assert [router.open_requests(name) for name in ("a", "b")] == [0, 0]
    scores = {choice.score for choice in router.rank(NOTHING, ("a", "b"))}
    assert scores == {0.0}
