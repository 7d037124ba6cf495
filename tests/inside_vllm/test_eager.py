"""One engine in eager mode: what requests reuse, and what they leave to others."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer import get_kv_transfer_group

from kvboost import KVBoost
from kvboost.integrations.vllm import check
from kvboost.integrations.vllm import worker as worker_module
from kvboost.integrations.vllm.branches import Branches
from kvboost.reuse.rope import Rotation
from support.vllm_engines import ALWAYS, MODEL, PAGE, Engine, Texts


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine(ALWAYS)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def ready(engine: Engine) -> Iterator[None]:
    """vLLM's own cache is empty."""
    engine.fresh()
    engine.set_slices(2048)
    engine.set_repair("auto")
    yield
    assert not engine.engine.has_unfinished_requests()


@pytest.fixture
def read(engine: Engine, texts: Texts) -> None:
    """The documents were read in one order, and are known now."""
    engine.ask(texts.prompt(0, 1, 2), tokens=1)
    engine.fresh()


def find_problem(engine: Engine, rotation: Rotation | None = None) -> str | None:
    worker = engine.worker
    assert worker.rotation is not None
    vocab = worker.config.model_config.get_vocab_size()
    return check.find_problem(worker.open_pages, worker.forward, rotation or worker.rotation, vocab)


def test_a_forward_through_gaps_is_a_plain_one(engine: Engine) -> None:
    rows = engine.rows
    assert rows > 0 and engine.connector.planner.moves  # it ran at the start
    assert find_problem(engine) is None
    assert engine.rows - rows > 2 * check.ROWS


def test_the_check_finds_wrong_rotations_and_wrong_rows(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = engine.worker.rotation
    assert right is not None
    wrong = Rotation(right.frequencies * 1.01)
    assert "rotated" in (find_problem(engine, wrong) or "")
    later = right.frequencies.clone()
    later[-1] = 0  # as if the last layer had no positions
    assert "rotates" in (find_problem(engine, Rotation(later)) or "")
    runner = engine.worker.forward._runner
    model = runner.model
    calls = []

    def off_by_one(input_ids, positions):  # type: ignore[no-untyped-def]
        calls.append(len(positions))
        shifted = positions if len(positions) == check.ROWS else positions + 1
        return model(input_ids=input_ids, positions=shifted)

    monkeypatch.setattr(runner, "model", off_by_one)
    assert "through gaps" in (find_problem(engine) or "")
    assert len(calls) == 2


def test_exact_text_is_loaded_and_gives_the_same_answer(engine: Engine, texts: Texts) -> None:
    engine.empty()
    ids = texts.prompt(0, 1, 2)
    first = engine.ask(ids)
    assert first.cached == 0 and first.usage is None
    engine.fresh()
    again = engine.ask(ids, "exact")
    assert again.tokens == first.tokens and again.difference(first) < 1e-4
    assert again.cached == (len(ids) - 1) // PAGE * PAGE
    assert again.usage == {
        "exact_tokens": again.cached,
        "moved_tokens": 0,
        "recomputed_tokens": 0,
    }


@pytest.mark.usefixtures("read")
def test_moved_text_is_reused_and_some_of_it_computed(engine: Engine, texts: Texts) -> None:
    rows = engine.rows
    engine.fresh()
    ids = texts.prompt(2, 1, 0)
    moved = engine.ask(ids)
    assert moved.usage is not None and moved.usage["moved_tokens"] > 400
    recomputed = moved.usage["recomputed_tokens"]
    # Between half and twice the ratio, by what the prompt's last row attends to.
    assert 0.09 < recomputed / moved.usage["moved_tokens"] < 0.39
    assert recomputed <= engine.rows - rows < len(ids) // 2
    # vLLM loads everything but the tail, which it computes itself.
    assert moved.cached == (len(ids) - 1) // PAGE * PAGE


@pytest.mark.usefixtures("read")
def test_all_rows_repaired_is_full_prefill(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(2, 1, 0)
    full = engine.full(ids)
    rows = engine.rows
    repaired = engine.ask(ids, {"ratio": 1.0})
    assert repaired.usage is not None and repaired.usage["moved_tokens"] > 400
    assert repaired.usage["recomputed_tokens"] == repaired.usage["moved_tokens"]
    assert engine.rows - rows > 400
    assert repaired.tokens == full.tokens and repaired.difference(full) < 1e-4


# Approximate pages stay out of vLLM's exact prefix cache.


@pytest.mark.usefixtures("read")
def test_after_moved_text_vllm_is_as_exact_as_before(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(2, 1, 0)
    full = engine.full(ids)
    moved = engine.ask(ids)
    assert moved.usage is not None and moved.difference(full) > 1e-3
    after = engine.ask(ids, "off")
    assert after.cached == 0 and after.logprobs == full.logprobs and after.tokens == full.tokens


@pytest.mark.usefixtures("read")
def test_without_branches_it_would_not_be(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    ids = texts.prompt(2, 1, 0)
    full = engine.full(ids)
    monkeypatch.setattr(Branches, "enter", lambda *_: None)
    assert engine.ask(ids).usage is not None
    after = engine.ask(ids, "off")
    engine.empty()  # without branches, approximate rows are kept as exact ones too
    assert after.cached > 400 and after.difference(full) > 1e-3


@pytest.mark.usefixtures("read")
def test_the_next_turn_finds_its_own_pages_and_nobody_else_does(
    engine: Engine, texts: Texts
) -> None:
    ids = texts.prompt(2, 1, 0)
    first = engine.ask(ids, tokens=33)
    longer = [*ids, *first.tokens, *texts.encode("\nQuestion: and heapq?\nAnswer:")]
    rows = engine.rows
    turn = engine.ask(longer)
    assert turn.cached >= len(ids) // PAGE * PAGE
    assert engine.rows == rows  # nothing was repaired again
    after = engine.ask(longer, "off")
    assert after.cached == 0
    full = engine.full(longer)
    assert after.tokens == full.tokens and after.logprobs == full.logprobs


@pytest.mark.usefixtures("read")
def test_rows_after_moved_ones_are_not_stored(engine: Engine, texts: Texts) -> None:
    """They would push out the text that they were made from."""
    engine.ask(texts.question, "off")  # its step stores what was read before
    chunks = engine.num_chunks
    moved = engine.ask(texts.prompt(2, 1, 0), tokens=33)
    assert moved.usage is not None and moved.usage["moved_tokens"] > 400
    engine.ask(texts.question, "off")
    assert engine.num_chunks == chunks


@pytest.mark.usefixtures("read")
def test_generated_pages_chain_onto_the_branch(engine: Engine, texts: Texts) -> None:
    """An answer after moved text is computed on top of approximate rows."""
    ids = texts.prompt(2, 1, 0)
    first = engine.ask(ids, tokens=3 * PAGE)
    engine.connector.branches.clear()  # the next turn does not know that there is a branch
    longer = [*ids, *first.tokens, *texts.question]
    assert engine.ask(longer, "off").cached == 0


# Others run meanwhile.


@pytest.mark.usefixtures("read")
def test_slices_between_steps_change_nothing_and_harm_nobody(engine: Engine, texts: Texts) -> None:
    short = texts.encode("The capital of France is Paris. The capital of Italy is")
    alone = engine.full(short, tokens=40)
    engine.set_repair("selective")  # what `auto` shifts depends on the slice
    ids = texts.prompt(2, 1, 0)
    at_once = engine.ask(ids)
    assert at_once.usage is not None and at_once.usage["recomputed_tokens"] > 64
    for slice_rows in (16, 48):
        engine.fresh()
        engine.set_slices(slice_rows)
        bystander = engine.add(short, "off", 40)
        for _ in range(4):
            engine.engine.step()
        request = engine.add(ids)
        steps = steps_while_loading(engine)
        answers = engine.finish()
        assert steps >= 2
        assert answers[request].usage == at_once.usage
        assert answers[request].tokens == at_once.tokens
        assert answers[request].logprobs[0] == at_once.logprobs[0]
        assert answers[bystander].tokens == alone.tokens
        assert answers[bystander].logprobs[0] == alone.logprobs[0]


def steps_while_loading(engine: Engine) -> int:
    """Runs until the load has ended; returns after how many steps."""
    steps = 0
    engine.engine.step()
    while engine.worker.loading:
        engine.engine.step()
        steps += 1
    return steps


@pytest.mark.usefixtures("read")
def test_of_several_loads_the_first_does_not_wait_for_the_last(
    engine: Engine, texts: Texts
) -> None:
    orders = [(2, 1, 0), (1, 0, 2), (1, 2, 0)]
    engine.set_repair("selective")  # what `auto` shifts depends on the slice
    alone = []
    for order in orders:
        alone.append(engine.ask(texts.prompt(*order)))
        engine.fresh()
    engine.set_slices(64)
    names = [engine.add(texts.prompt(*order)) for order in orders]
    loading = []
    while not loading or loading[-1]:
        engine.engine.step()
        loading.append(len(engine.worker.loading))
    assert loading[0] == 3 and {1, 2} & set(loading)
    answers = engine.finish()
    for name, expected in zip(names, alone, strict=True):
        assert answers[name].tokens == expected.tokens
        assert answers[name].usage == expected.usage


@pytest.mark.usefixtures("read")
def test_loads_go_on_when_vllm_has_launched_its_own_forward(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM 0.26 starts loads before it, 0.32 after it."""
    worker, seen = engine.worker, []
    connector: Any = get_kv_transfer_group()
    start, finished = connector.start_load_kv, connector.get_finished

    def started(*given: Any, **more: Any) -> None:
        start(*given, **more)
        seen.append(("started", len(worker.loading)))

    def asked(*given: Any) -> Any:
        result = finished(*given)
        seen.append(("asked", len(worker.loading)))
        return result

    monkeypatch.setattr(connector, "start_load_kv", started)
    monkeypatch.setattr(connector, "get_finished", asked)
    bystander = engine.add(texts.question, "off", 40)
    for _ in range(4):
        engine.engine.step()
    engine.set_slices(16)
    engine.add(texts.prompt(2, 1, 0))
    engine.engine.step()
    assert seen[-2:] == [("started", 0), ("asked", 1)]
    assert bystander in engine.finish()


@pytest.mark.usefixtures("read")
def test_chunks_that_are_not_where_pages_are_come_meanwhile(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = texts.prompt(2, 1, 0)
    expected = engine.ask(ids)
    worker, brought = engine.worker, []
    bring = worker._bring

    def watched(infos: Any, is_ahead: bool) -> Any:
        brought.append((threading.current_thread() is threading.main_thread(), is_ahead))
        return bring(infos, is_ahead)

    monkeypatch.setattr(worker, "_bring", watched)
    monkeypatch.setattr(worker, "is_near", False)
    for most, is_ahead in ((worker_module.AHEAD_ROWS, True), (8, False)):
        monkeypatch.setattr(worker_module, "AHEAD_ROWS", most)
        engine.fresh()
        bystander = engine.add(texts.question, "off", 40)
        for _ in range(4):
            engine.engine.step()
        request = engine.add(ids)
        answers = engine.finish()
        assert answers[request].tokens == expected.tokens
        assert answers[request].usage == expected.usage and bystander in answers
        assert brought.pop() == (False, is_ahead) and not worker.ahead


@pytest.mark.usefixtures("read")
def test_a_request_that_waits_for_pages_is_planned_once(
    engine: Engine, texts: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager, planner = engine.scheduler.kv_cache_manager, engine.connector.planner
    allocate, plan, planned, refused = manager.allocate_slots, planner.plan, [], []

    def none_at_first(*given: Any, **more: Any) -> Any:
        if len(refused) < 3:
            return refused.append(1)
        return allocate(*given, **more)

    monkeypatch.setattr(manager, "allocate_slots", none_at_first)
    monkeypatch.setattr(planner, "plan", lambda *given: planned.append(1) or plan(*given))
    moved = engine.ask(texts.prompt(2, 1, 0))
    assert moved.usage is not None and moved.usage["moved_tokens"] > 400
    assert (len(refused), len(planned)) == (3, 1)


@pytest.mark.usefixtures("read")
def test_an_aborted_load_frees_its_pages(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(2, 1, 0)
    expected = engine.ask(ids)
    engine.fresh()
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    engine.set_slices(16)
    bystander = engine.add(texts.question, "off", 40)
    for _ in range(4):
        engine.engine.step()
    aborted = engine.add(ids)
    engine.engine.step()
    assert engine.worker.loading
    engine.engine.abort_request([aborted])
    assert engine.finish().keys() == {bystander}
    assert not engine.worker.loading and not engine.connector.served
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == free
    engine.fresh()
    engine.set_slices(2048)
    assert engine.ask(ids).tokens == expected.tokens


# What requests may say.


def test_requests_with_other_salts_share_nothing(engine: Engine, texts: Texts) -> None:
    engine.empty()
    ids = texts.prompt(0)
    engine.ask(ids, cache_salt="a", tokens=1)
    engine.fresh()
    assert engine.ask(ids, cache_salt="b").usage is None
    assert engine.ask(ids).usage is None
    engine.fresh()
    assert engine.ask(ids, cache_salt="a").usage is not None


@pytest.mark.parametrize("mode", ["fast", {"ratio": 7}, {"modes": "off"}, 3])
def test_what_cannot_be_read_is_ignored_with_a_warning(
    engine: Engine, texts: Texts, mode: object, caplog: pytest.LogCaptureFixture
) -> None:
    engine.ask(texts.prompt(0), tokens=1)
    engine.fresh()
    logger = logging.getLogger("vllm.kvboost")
    logger.addHandler(caplog.handler)
    answer = engine.ask(texts.prompt(0), mode, tokens=1)  # type: ignore[arg-type]
    logger.removeHandler(caplog.handler)
    assert answer.usage is not None and answer.usage["exact_tokens"] > 150
    assert "ignores what request" in caplog.text


def test_off_neither_reads_nor_keeps(engine: Engine, texts: Texts) -> None:
    engine.empty()
    ids = texts.prompt(0)
    engine.ask(ids, "off", tokens=1)
    engine.fresh()
    assert engine.ask(ids).usage is None
    engine.fresh()
    assert engine.ask(ids, "off").cached == 0


def test_documents_that_begin_at_boundaries_are_found(engine: Engine, texts: Texts) -> None:
    engine.empty()
    ids = texts.prompt(0, 1)
    places = [len(texts.head), len(texts.head) + len(texts.documents[0])]
    engine.ask(ids, {"mode": "repaired", "boundaries": places})
    engine.fresh()
    moved = engine.ask(texts.prompt(1, 0))
    assert moved.usage is not None
    assert moved.usage["moved_tokens"] >= sum(map(len, texts.documents[:2])) - 8


def test_a_reset_with_the_connector_forgets(engine: Engine, texts: Texts) -> None:
    ids = texts.prompt(0)
    engine.ask(ids)
    engine.fresh()
    assert engine.ask(ids).usage is not None
    engine.empty()
    again = engine.ask(ids)
    assert again.usage is None and again.cached == 0
    assert engine.connector.branches._known == {}


# The same rows as on transformers.


@pytest.mark.parametrize("strategy", ["none", "selective"])
def test_the_same_rows_give_what_they_give_on_transformers(
    engine: Engine, texts: Texts, strategy: str
) -> None:
    """These strategies choose rows without looking at numbers, so both engines choose the same."""
    engine.set_repair(strategy)
    donor, ids = texts.prompt(0, 1, 2), texts.prompt(2, 1, 0)
    engine.empty()  # other prompts may hold the same text
    engine.ask(donor, tokens=1)
    engine.fresh()
    rows = engine.rows
    here = engine.ask(ids)
    assert engine.rows > rows and here.usage is not None
    with KVBoost.from_pretrained(
        str(MODEL), dtype="float32", recompute_strategy=strategy, reuse_moved="always"
    ) as other:
        other.generate(donor, 1)
        there = other.generate(ids, 8, logprobs=5)
        baseline = other.generate(ids, 8, "baseline", logprobs=5)
    assert here.usage["moved_tokens"] == there.moved_tokens > 400
    assert here.usage["recomputed_tokens"] == there.recomputed_tokens
    assert here.tokens == there.token_ids
    assert there.logprobs is not None and baseline.logprobs is not None
    reused, plain = (dict(one.logprobs[0].top) for one in (there, baseline))
    common = here.logprobs[0].keys() & reused.keys()
    assert len(common) >= 4
    assert max(abs(here.logprobs[0][token] - reused[token]) for token in common) < 1e-3
    # Full prefill gives other numbers, so this compares repairs.
    assert max(abs(reused[token] - plain[token]) for token in reused.keys() & plain.keys()) > 1e-2
