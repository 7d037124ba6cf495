"""Models of which some layers have states: the architectures of Falcon-H1 and Granite 4, with
random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvboost.cache import codec
from support.hybrids import save_for_vllm
from support.planting import chunk_files
from support.tiny import byte_tokenizer
from support.vllm_engines import PAGE, Answer, Engine, Texts, talk_together

CHUNK = 128
EXTENDED = {"worker_extension_cls": "support.states_at_steps.StatesAtSteps"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_for_vllm("falcon_h1", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(byte_tokenizer())


def last_page_end(ids: list[int], page: int = PAGE) -> int:
    """The last row of a prompt after which vLLM leaves states."""
    return (len(ids) - 1) // page * page


def assert_same(answer: Answer, expected: Answer, rows: int) -> None:
    """The answer is what vLLM alone answers, after so many loaded rows."""
    assert answer.tokens == expected.tokens and answer.difference(expected) < 1e-4
    assert answer.usage is not None and answer.usage["exact_tokens"] == answer.cached == rows


def test_a_prompt_goes_on_from_the_last_states_that_it_shares(
    start: Callable[..., Engine], texts: Texts, tmp_path: Path
) -> None:
    options = {"disk_cache_dir": str(tmp_path), "chunk_size": CHUNK}
    engine = start(options, **EXTENDED)
    ids = texts.prompt(0, 1, 2)
    full = engine.full(ids)
    first = engine.ask(ids)
    engine.fresh()
    assert_same(engine.ask(ids), full, last_page_end(ids))
    # The next turn of a conversation goes on where the last page of the prompt began.
    turn = [*ids, *first.tokens, *texts.question]
    expected = engine.full(turn)
    assert_same(engine.ask(turn), expected, last_page_end(ids))
    # Another question goes on from its own states, which vLLM computes when it is asked first.
    other = [*ids[: len(ids) - 100], *texts.question]
    expected = engine.full(other)
    again = engine.ask(other)
    assert again.tokens == expected.tokens and again.difference(expected) < 1e-4
    engine.fresh()
    assert_same(engine.ask(other), expected, last_page_end(other))
    # Moved text is not reused.
    engine.fresh()
    moved = engine.ask(texts.prompt(2, 1, 0))
    assert moved.usage is None and moved.cached == 0
    engine = start(options, **EXTENDED)
    assert_same(engine.ask(turn), engine.full(turn), last_page_end(turn))


def test_states_of_a_long_answer_are_kept_while_it_is_written(
    start: Callable[..., Engine], texts: Texts
) -> None:
    engine = start({"chunk_size": CHUNK}, **EXTENDED)
    ids = texts.prompt(0, 1)
    long = engine.full(ids, tokens=400)
    engine.ask(ids, tokens=400)
    turn = [*ids, *long.tokens, *texts.question]
    expected = engine.full(turn)
    rows = last_page_end(ids) + 400 // CHUNK * CHUNK
    assert_same(engine.ask(turn), expected, rows)


def test_requests_that_run_together_keep_their_own_states(
    start: Callable[..., Engine], texts: Texts
) -> None:
    """Each reads in slices, among others that answer, and memory is another's at once."""
    options = {"max_model_len": 1024, "max_num_batched_tokens": 160, "num_gpu_blocks_override": 128}
    engine = start({"chunk_size": CHUNK}, **options, **EXTENDED)
    talk_together(engine, texts, least=1)


def test_preempted_and_cancelled_requests_change_no_answer(
    start: Callable[..., Engine], texts: Texts
) -> None:
    pages = {"max_model_len": 1024, "num_gpu_blocks_override": 70}
    engine = start({"chunk_size": CHUNK}, **pages, **EXTENDED)
    prompts = [texts.prompt(*order) for order in ((0, 1), (1, 2), (2, 0))]
    full = [engine.full(ids, tokens=200) for ids in prompts]
    engine.empty()
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def seen(request, *args, **more):  # type: ignore[no-untyped-def]
        preempted.append(request.request_id)
        preempt(request, *args, **more)

    engine.scheduler._preempt_request = seen
    for _ in range(2):  # the second time from what the first has kept
        names = [engine.add(ids, tokens=200) for ids in prompts]
        cancelled = engine.add(prompts[0][100:], tokens=200)
        for _ in range(3):
            engine.engine.step()
        engine.engine.abort_request([cancelled])
        answers = engine.finish()
        for name, expected in zip(names, full, strict=True):
            assert answers[name].tokens == expected.tokens
        engine.fresh()
    assert preempted
    for ids, expected in zip(prompts, full, strict=True):
        assert_same(engine.ask(ids, tokens=200), expected, last_page_end(ids))
        engine.fresh()


def test_what_is_lost_is_computed(
    start: Callable[..., Engine], texts: Texts, tmp_path: Path
) -> None:
    options = {"disk_cache_dir": str(tmp_path), "chunk_size": CHUNK, "max_cache_bytes": 0}
    ids = texts.prompt(0, 1)
    engine = start(options, **EXTENDED)
    full = engine.ask(ids)
    engine = start(options, **EXTENDED)  # the folder is read at the start
    engine.ask(texts.prompt(2, 1), "off")  # so that pages hold other rows
    engine.fresh()
    for path in chunk_files(tmp_path):  # the last one, with states, is still there
        if codec.read_file(path).info.base_position == CHUNK:
            path.write_bytes(b"damaged")
    again = engine.ask(ids)
    assert again.cached == 0 and again.tokens == full.tokens and again.difference(full) < 1e-4
    assert engine.connector.tally.totals()["loads"] == {"loaded": 0, "failed": 1}
    engine.fresh()
    assert_same(engine.ask(ids), full, last_page_end(ids))


def test_layers_with_states_may_have_layers_with_rows_between(
    start: Callable[..., Engine], texts: Texts, tmp_path: Path
) -> None:
    """Granite's layers have rows or states, with their groups in another order; and states are
    larger than the rows of a page, so vLLM has larger pages than were asked for."""
    folder = save_for_vllm("granitemoehybrid", tmp_path)
    engine = start({"chunk_size": CHUNK}, folder=folder, **EXTENDED)
    page = engine.connector.page
    assert engine.connector.groups.with_states == (0,) and page > PAGE
    ids = texts.prompt(0, 1)
    full = engine.full(ids)
    first = engine.ask(ids)
    engine.fresh()
    assert_same(engine.ask(ids), full, last_page_end(ids, page))
    turn = [*ids, *first.tokens, *texts.question]
    expected = engine.full(turn)
    assert_same(engine.ask(turn), expected, last_page_end(ids, page))


def test_workers_keep_their_own_parts_of_states(
    start: Callable[..., Engine], texts: Texts, tmp_path: Path
) -> None:
    options = {"disk_cache_dir": str(tmp_path), "chunk_size": CHUNK}
    engine = start(options, workers=2, **EXTENDED)
    ids = texts.prompt(0, 1)
    full = engine.full(ids)
    engine.ask(ids)
    engine.fresh()
    assert_same(engine.ask(ids), full, last_page_end(ids))
    engine = start(options, workers=2, **EXTENDED)
    assert_same(engine.ask(ids), full, last_page_end(ids))
