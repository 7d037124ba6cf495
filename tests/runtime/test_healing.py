"""Rows that were computed on moved text become exact, and nothing else changes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import ConfigError, KVBoost
from kvboost.runtime import healing, idle_work
from kvboost.runtime.keeping import Keeping
from support.forwards import intercept
from support.healed import SLOPPY, heal_until, num_exact, warmed
from support.paged_engines import TWO_LAYERS, leaks, paged_engine
from support.prompts import BASELINE, EXACT, HEADER, MOVED, PASSAGES, QUESTION, prompt_of, words
from support.tiny import CONTEXT, DEVICE, chunk_bytes, dynamic_model, make_engine, tiny_model


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healing, "SLICE_ROWS", 16)


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with warmed(make_engine(tiny_model("llama"))) as made:
        yield made
        assert made.check_integrity() == []


def after(layers: int) -> Callable[[], bool]:
    """Interrupts healing after so many layers of forwards."""
    counted = itertools.count()
    return lambda: next(counted) >= layers


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "llama4_text", "gpt_oss", "internvl"])
def test_a_healed_conversation_is_what_full_prefill_leaves(name, tiny_engine) -> None:
    engine = warmed(tiny_engine(name), "heal")
    options = {"cache_salt": "heal", "ignore_eos": True}
    prompt = prompt_of([3, 1])
    first = engine.generate(prompt, 6, cache_salt="heal", **SLOPPY)
    assert first.moved_tokens > 30 and first.answer_exact_from == 6
    assert first.healing.status == "waiting" and first.healed_tokens == 0
    report = engine.heal()
    assert report.conversations == 1 and report.waiting == 0
    assert first.healing.status == "done" and first.answer_exact_from == 6
    assert first.healed_tokens == first.healing.approximate_tokens == report.tokens
    follow = [*prompt, *first.token_ids, *words(9, 10)]
    full = engine.generate(follow, 8, BASELINE, **options)
    exact = engine.generate(follow, 8, EXACT, **options, keep=False)
    again = engine.generate(follow, 8, MOVED, cache_salt="heal", **SLOPPY)
    assert exact.exact_tokens == len(prompt) + 5  # the last token has no row
    assert again.moved_tokens == again.approximate_tokens == again.answer_exact_from == 0
    assert exact.token_ids == again.token_ids == full.token_ids
    engine.forget_salt("heal")


def test_all_rows_from_the_exact_prefix_on_are_computed_in_order(
    engine, small_slices, monkeypatch
) -> None:
    """Those that repair had recomputed too, and those of the question and the answer."""
    options = {"recompute_strategy": "query", "recompute_ratio": 0.5, "ignore_eos": True}
    result = engine.generate(prompt_of([3, 1]), 5, heal="idle", **options)
    assert result.recomputed_tokens > 10
    computed: list[int] = []

    def spy(run, segments, cache):
        computed.extend(itertools.chain.from_iterable(s.positions for s in segments))
        return run(segments, cache)

    intercept(engine, monkeypatch, spy)
    engine.heal()
    assert computed == list(range(result.exact_tokens, result.prompt_tokens + 4))


def test_approximate_copies_are_dropped_once_there_are_exact_ones(engine) -> None:
    def approximate() -> int:
        return sum(chunk["lineage"] == "approximate" for chunk in engine.chunks(1000))

    engine.generate(prompt_of([3, 1]), 4, **SLOPPY)
    other = engine.generate(prompt_of([3, 2]), 4, **{**SLOPPY, "heal": "off"})
    both = approximate()
    engine.heal()
    assert 0 < approximate() < both
    assert engine.cache_stats()["healing"]["superseded_chunks"] == both - approximate()
    again = engine.generate([*prompt_of([3, 2]), *other.token_ids, 1, 2, 3], 1, **SLOPPY)
    assert again.approximate_tokens > 0  # the other conversation has its own still


def test_healing_ends_anywhere_and_goes_on_from_there(engine, small_slices) -> None:
    prompt = prompt_of([3, 1])
    result = engine.generate(prompt, 4, **SLOPPY)
    ids = [*prompt, *result.token_ids]
    reached = [num_exact(engine, ids)]
    while result.healing.status == "waiting":
        heal_until(engine, after(4))  # one slice of three layers, and one layer more
        reached.append(num_exact(engine, ids))
        assert result.healed_tokens == reached[-1] - reached[0]
    assert reached == sorted(set(reached)) and reached[-1] == len(prompt) + 3
    assert engine.cache_stats()["healing"]["interrupted"] == len(reached) - 2 > 3
    assert result.healing.audit.compared_tokens == 4


def test_healing_ends_while_it_copies_rows_too(engine, monkeypatch) -> None:
    result = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)
    monkeypatch.setattr("kvboost.runtime.prefill.YIELD_AFTER_SECONDS", -1.0)
    forwards: list[int] = []

    def spy(run, segments, cache):
        forwards.append(len(segments))
        return run(segments, cache)

    intercept(engine, monkeypatch, spy)
    heal_until(engine, after(0))
    assert result.healing.status == "waiting" and not forwards
    engine.heal()
    assert result.healing.status == "done" and forwards


def test_healing_ends_between_slices_where_forwards_cannot_end(
    engine, monkeypatch, small_slices
) -> None:
    monkeypatch.setattr(engine.runtime.backend, "ends_forwards", False)
    result = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)
    reached = []
    while result.healing.status == "waiting":
        heal_until(engine, after(1))  # one slice
        reached.append(result.healed_tokens)
    assert reached == sorted(set(reached)) and len(reached) > 3
    assert result.healed_tokens == result.healing.approximate_tokens


def test_admission_beyond_the_frontier_would_be_noticed(engine, monkeypatch) -> None:
    """A negative control of ``num_exact``: if healing admitted rows that it has not reached, they
    would be served as exact, and the check would fail."""
    result = engine.generate(prompt_of([3, 1]), 4, **SLOPPY)
    admit = Keeping.admit

    def ignore_frontier(self, **options):
        self._state.rows = len(self._request.token_ids)
        return admit(self, **options)

    monkeypatch.setattr(healing, "SLICE_ROWS", 16)
    monkeypatch.setattr(Keeping, "admit", ignore_frontier)
    heal_until(engine, after(4))
    with pytest.raises(AssertionError, match="called exact are off"):
        num_exact(engine, [*prompt_of([3, 1]), *result.token_ids])
    engine.clear()


def test_a_conversation_takes_the_rows_that_another_one_has_healed(engine) -> None:
    first = engine.generate(prompt_of([3, 1, 2]), 4, **SLOPPY)
    second = engine.generate(prompt_of([3, 1, 0]), 4, **SLOPPY)
    engine.heal()
    stats = engine.cache_stats()["healing"]
    assert first.healing.status == second.healing.status == "done"
    assert first.healed_tokens > 0 and stats["share"] == 1.0
    shared = len(HEADER) + len(PASSAGES[3]) + len(PASSAGES[1])
    approximate = first.healing.approximate_tokens + second.healing.approximate_tokens
    assert stats["computed_tokens"] == approximate - (shared - first.exact_tokens)


def test_a_cancelled_answer_is_healed_as_far_as_it_went(engine) -> None:
    with engine.stream(prompt_of([3, 1]), 40, **SLOPPY) as stream:
        for _ in range(3):
            next(stream)
    result = stream.result
    assert result.finish_reason == "cancelled" and result.healing.status == "waiting"
    engine.heal()
    ids = [*prompt_of([3, 1]), *result.token_ids]
    assert num_exact(engine, ids) == len(ids) - 1 == result.exact_tokens + result.healed_tokens


@pytest.mark.parametrize("options", [{"heal": "off"}, {"keep": False}, {"mode": EXACT}])
def test_what_is_not_to_be_healed_is_not(engine, options) -> None:
    result = engine.generate(prompt_of([3, 1]), 2, **{**SLOPPY, **options})
    assert result.healing is None and result.healed_tokens == 0
    assert engine.heal() == healing.HealReport(0, 0, 0)


def test_nothing_that_was_forgotten_comes_back(engine, small_slices) -> None:
    before, during = (engine.generate(prompt_of(order), 2, **SLOPPY) for order in ([3, 1], [2, 0]))
    engine.forget(PASSAGES[3])
    engine.heal()
    assert before.healing.status == "dropped"
    during = engine.generate(prompt_of([2, 0]), 2, **SLOPPY)

    def forget_at_the_second_slice() -> bool:
        if during.healing.status == "waiting" and next(layers) == 4:
            engine.forget(PASSAGES[2])
        return False

    layers = itertools.count()
    while during.healing.status == "waiting":
        heal_until(engine, forget_at_the_second_slice)
    assert during.healing.status == "dropped" and next(layers) > 4
    for order in ([3, 1], [2, 0]):
        assert num_exact(engine, prompt_of(order)) <= 16  # what precedes the passage


def test_what_waits_is_bounded(engine, monkeypatch) -> None:
    monkeypatch.setattr(idle_work, "MOST_CONVERSATIONS", 2)
    orders = ([3, 1], [2, 1], [1, 3])
    results = [engine.generate(prompt_of(order), 1, **SLOPPY) for order in orders]
    assert [one.healing.status for one in results] == ["dropped", "waiting", "waiting"]
    monkeypatch.setattr(idle_work, "MOST_TOKENS", 200)
    last = engine.generate(prompt_of([3, 0]), 1, **SLOPPY)
    assert results[1].healing.status == results[2].healing.status == "dropped"
    assert engine.heal().conversations == 1 and last.healing.status == "done"
    assert engine.cache_stats()["healing"]["dropped"] == 3


def test_a_failure_is_counted_and_leaves_the_engine_usable(engine, monkeypatch) -> None:
    result = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        intercept(engine, patch, fail)
        engine.heal()
    assert result.healing.status == "failed"
    assert engine.cache_stats()["healing"]["failed"] == 1
    assert engine.generate(prompt_of([3, 1]), 2, EXACT).moved_tokens == 0


def test_rows_that_rotate_by_length_are_healed_up_to_there() -> None:
    with make_engine(dynamic_model()) as engine:  # reuses the first 64 rows
        engine.warm(words(1, 40))
        prompt = [*words(2, 5), *words(1, 40), *words(3, 16)]
        result = engine.generate(prompt, 8, **SLOPPY)
        assert result.moved_tokens == 40
        engine.heal()
        assert result.healing.status == "done"
        assert num_exact(engine, [*prompt, *result.token_ids][:63]) == 63


@settings(max_examples=8)
@given(
    st.lists(
        st.sampled_from(
            ["ask", "continue", "again", "join", "cancel", "interrupt", "evict", "forget"]
        ),
        min_size=4,
        max_size=14,
    ),
    st.randoms(use_true_random=False),
)
def test_whatever_happens_only_exact_rows_are_called_exact(events, random) -> None:
    model = tiny_model("llama")
    most = random.choice([1 << 30, 24 * chunk_bytes(model)])
    with warmed(make_engine(model, max_cache_bytes=most)) as engine:
        asked: list[list[int]] = []
        for event in events:
            if event == "ask" or not asked:
                asked.append(prompt_of(random.sample(range(4), 2)))
            match event:
                case "ask" | "again":
                    engine.generate(random.choice(asked), 3, **SLOPPY)
                case "join":  # from now on the loop heals too, at any moment
                    engine.generate_batch(random.choices(asked, k=2), 3, **SLOPPY)
                case "continue":
                    ids = random.choice(asked)
                    answer = engine.generate(ids, 3, **SLOPPY).token_ids
                    if len(ids) + 20 < CONTEXT:
                        asked.append([*ids, *answer, *words(len(asked), 9)])
                case "cancel":
                    with engine.stream(random.choice(asked), 9, **SLOPPY) as stream:
                        for _ in range(random.randrange(3)):
                            next(stream, None)
                case "interrupt":
                    heal_until(engine, after(random.randrange(12)))
                case "evict":
                    store = engine.runtime.store
                    with store.lock:
                        known = list(store.holdings.catalogue)
                        for key in random.sample(known, min(2, len(known))):
                            if key in store.holdings.catalogue:
                                store.holdings.residency.mark_lost(key)
                case "forget":
                    engine.forget(random.choice(PASSAGES))
            for ids in asked:
                num_exact(engine, ids)
        assert engine.heal().waiting == 0
        for ids in asked:
            num_exact(engine, ids)
            full = engine.generate(ids, 3, BASELINE, ignore_eos=True)
            assert engine.generate(ids, 3, EXACT, ignore_eos=True).token_ids == full.token_ids
        assert engine.check_integrity() == []


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter would take its time")
def test_conversations_in_pages_are_healed_too(monkeypatch, small_slices) -> None:
    with paged_engine(monkeypatch, sizes=TWO_LAYERS) as engine:
        engine.warm([*HEADER, *PASSAGES[1]])
        prompt = [*words(4, 5), *PASSAGES[1], *QUESTION]
        result = engine.generate(prompt, 3, **SLOPPY)
        assert result.moved_tokens > 30
        heal_until(engine, after(3))  # a slice and a layer
        assert result.healing.status == "waiting" and result.healed_tokens == 16 - 5
        engine.heal()
        audit = result.healing.audit
        assert audit.compared_tokens == 3 and audit.mean_kl > 1e-6  # of the first token
        assert num_exact(engine, [*prompt, *result.token_ids]) == len(prompt) + 2
        assert not leaks(engine)


def test_a_wrong_choice_is_an_error(engine) -> None:
    with pytest.raises(ConfigError, match="heal='later' is not available"):
        engine.generate([1, 2], heal="later")
    with pytest.raises(ConfigError, match="heal='never' is not available"):
        make_engine(tiny_model("llama"), heal="never")
    with pytest.raises(ConfigError, match="timeout"):
        engine.heal(-1)


# Idle time: the loop heals, and requests do not wait for it.


class Listener:
    """Notes when an answer is complete."""

    event_loop = None

    def __init__(self, events: list[str]) -> None:
        self._events = events
        self.ended = threading.Event()

    def push(self, pieces: list[str]) -> None: ...

    def end(self, error: BaseException | None) -> None:
        assert error is None
        self._events.append("answered")
        self.ended.set()


def watch_healing(
    monkeypatch: pytest.MonkeyPatch, events: list[str], at_layer: int, act: Callable[[], None]
) -> None:
    """Notes every layer that healing computes; before one of them, a request comes."""
    heal_layer = healing._Interrupt.on_fresh

    def on_fresh(self: Any, *given: Any) -> None:
        if sum(event == "layer" for event in events) == at_layer and "request" not in events:
            events.append("request")
            act()
        heal_layer(self, *given)
        events.append("layer")

    monkeypatch.setattr(healing._Interrupt, "on_fresh", on_fresh)


def check_order(events: list[str]) -> None:
    request, answered = events.index("request"), events.index("answered")
    assert "layer" in events[:request], "healing had begun"
    assert "layer" not in events[request:answered], "healing went on while a request waited"
    assert "layer" in events[answered:], "and was taken up again"


@pytest.mark.usefixtures("small_slices")
def test_a_request_of_the_loop_does_not_wait_for_healing(engine, monkeypatch) -> None:
    events: list[str] = []
    listener = Listener(events)

    def submit() -> None:
        engine.answer_to(lambda state: listener, QUESTION, 3, MOVED)

    watch_healing(monkeypatch, events, at_layer=4, act=submit)
    (result,) = engine.generate_batch([prompt_of([3, 1])], 4, **SLOPPY)
    assert listener.ended.wait(300)
    assert engine.heal().waiting == 0
    check_order(events)
    assert result.healing.status == "done" and result.healing.audit is not None
    assert num_exact(engine, [*prompt_of([3, 1]), *result.token_ids]) == result.prompt_tokens + 3


@pytest.mark.usefixtures("small_slices")
def test_a_request_outside_the_loop_does_not_wait_for_healing(engine, monkeypatch) -> None:
    events: list[str] = []
    holds = threading.Event()
    hold = idle_work.IdleQueue.hold

    def holding(self: Any) -> Any:
        holds.set()
        return hold(self)

    def ask() -> None:
        engine.generate(QUESTION, 3)
        events.append("answered")

    asking = threading.Thread(target=ask)

    def start() -> None:
        monkeypatch.setattr(idle_work.IdleQueue, "hold", holding)
        holds.clear()
        asking.start()
        assert holds.wait(300)

    watch_healing(monkeypatch, events, at_layer=4, act=start)
    (result,) = engine.generate_batch([prompt_of([3, 1])], 4, **SLOPPY)
    while not holds.is_set():
        holds.wait(300)
    asking.join(300)
    assert engine.heal().waiting == 0
    check_order(events)
    assert result.healing.status == "done"


def test_an_open_stream_of_this_thread_does_not_block_heal(engine) -> None:
    first = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)
    with engine.stream(QUESTION, 4, ignore_eos=True) as stream:
        next(stream)
        assert engine.heal().conversations == 1
    assert first.healing.status == "done"


def test_heal_ends_in_time(engine) -> None:
    result = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)
    assert engine.heal(timeout=0).waiting == 1
    assert result.healing.status == "waiting"


def test_an_engine_closes_while_conversations_wait() -> None:
    engine = warmed(make_engine(tiny_model("llama")))
    result = engine.generate(prompt_of([3, 1]), 2, **SLOPPY)
    engine.close()
    assert result.healing.status == "dropped"
    assert engine.cache_stats()["healing"]["waiting"] == 0
