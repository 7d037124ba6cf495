"""Many requests at once: each one's answer is the one it gets alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost import (
    ConfigError,
    GenerationMode,
    GenerationResult,
    KVBoost,
    KVTooLargeError,
    PromptError,
    QueueFullError,
    ShuttingDownError,
)
from kvboost.cache.lookup.hits import KnownRows
from kvboost.model.execution.segment import Segment
from kvboost.runtime import decode
from kvboost.runtime.devices import Cpu, Device
from support.batches import EXACT, TEXT, alone, on_buffers, slow_down
from support.forwards import intercept
from support.tiny import CONTEXT, make_engine, tiny_model

pytestmark = pytest.mark.usefixtures("share_short_beginnings")


def assert_equal_unless_tied(result: GenerationResult, expected: GenerationResult) -> None:
    """Greedy answers are equal up to the first token whose two best candidates are equally likely
    to the last bits: there rounding decides, and a batch rounds differently."""
    pairs = zip(result.token_ids, expected.token_ids, strict=True)
    different = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if different is not None:
        assert expected.logprobs is not None
        (_, best), (_, second) = expected.logprobs[different].top
        assert best - second < 1e-5, f"token {different} differs"


@settings(max_examples=8)
@given(
    st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 150), st.integers(0, 60), st.integers(1, 24)),
        min_size=1,
        max_size=10,
    ),
    st.integers(1, 40),
    st.integers(1, 6),
)
def test_a_batch_gives_the_answers_of_single_requests(
    drawn: list[tuple[int, int, int, int]], step_rows: int, max_running: int
) -> None:
    """Ragged lengths, shared beginnings, and as many joins and leaves as there are answers of
    different length."""
    prompts = [
        TEXT[place * 200 : place * 200 + shared] + TEXT[3000 + index * 60 : 3000 + index * 60 + own]
        for index, (place, shared, own, _) in enumerate(drawn)
    ]
    limits = [tokens for *_, tokens in drawn]
    model = tiny_model("llama")
    with (
        patch.object(Device, "step_rows", step_rows),
        patch.object(Cpu, "step_rows", step_rows),
        make_engine(model, max_running=max_running) as engine,
    ):
        expected = [
            engine.generate(prompt, most, GenerationMode.BASELINE, logprobs=2)
            for prompt, most in zip(prompts, limits, strict=True)
        ]
        each = [{"max_new_tokens": most} for most in limits]
        for _ in range(2):  # what the first batch keeps serves the second
            results = engine.generate_batch(prompts, mode=EXACT, each=each)
            for result, alone_result, prompt in zip(results, expected, prompts, strict=True):
                assert_equal_unless_tied(result, alone_result)
                assert result.prompt_tokens == len(prompt) == result.spans[-1].end
        assert engine.serving_stats()["kv_bytes"] == 0
        assert engine.check_integrity() == []


@pytest.mark.parametrize(
    "name", ["mistral-window", "gemma2", "gemma3_text", "qwen3", "mixtral", "glm", "phi3"]
)
def test_every_kind_of_attention_goes_in_a_batch(name: str, make: Callable[..., KVBoost]) -> None:
    engine = make(name)
    prompts = [TEXT[:100] + TEXT[i * 40 : i * 40 + 20 + i] for i in range(4)]
    expected = [alone(engine, prompt, 8) for prompt in prompts]
    assert [one.token_ids for one in engine.generate_batch(prompts, 8, EXACT)] == expected


@pytest.mark.parametrize("name", ["bloom", "gpt2"])
def test_models_with_their_own_attention_run_in_a_batch_too(name: str) -> None:
    with make_engine(tiny_model(name), strict=False) as engine:
        prompts = [TEXT[i * 10 : i * 10 + 30] for i in range(3)]
        expected = [alone(engine, prompt, 6) for prompt in prompts]
        assert [one.token_ids for one in engine.generate_batch(prompts, 6)] == expected


def test_requests_keep_their_own_options(make: Callable[..., KVBoost]) -> None:
    engine = make()
    prompt = TEXT[:60]
    each: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 7, "max_new_tokens": 9},
        {"temperature": 0.8, "seed": 8, "cache_salt": "mine"},
        {"logprobs": 2, "mode": "baseline"},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {65: 5.0}},
    ]
    text = engine.generate(prompt, 12).output_text
    each.append({"stop": text[3:5]})
    got = engine.generate_batch([prompt] * len(each), 12, each=each)  # type: ignore[arg-type]
    for result, own in zip(got, each, strict=True):
        options: dict[str, Any] = {"max_new_tokens": 12, **own}
        expected = engine.generate(prompt, **options)
        assert result.token_ids == expected.token_ids
        assert (result.output_text, result.finish_reason) == (
            expected.output_text,
            expected.finish_reason,
        )
        assert (result.logprobs is None) == (expected.logprobs is None)
    assert got[2].exact_tokens == 0 and got[3].exact_tokens == 0


@on_buffers
def test_shared_text_is_read_and_held_once(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvboost.runtime.scheduler.SHARING_WAIT", 60.0)
    engine = make()
    computed: list[int] = []

    def counting(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        computed.append(sum(map(len, segments)))
        return run(segments, cache)

    held: list[int] = []
    live = engine.runtime.running.nbytes
    intercept(engine, monkeypatch, counting)
    monkeypatch.setattr(
        engine.runtime.running, "nbytes", lambda: (held.append(live()[0]), live())[1]
    )
    prompts = [TEXT[:160] + TEXT[1000 + i : 1010 + i] for i in range(6)]
    results = engine.generate_batch([*prompts, prompts[0]], 12, EXACT, ignore_eos=True)
    assert sum(computed) < 160 + 7 * (30 + 12)
    assert [one.exact_tokens for one in results] == [0] + [160] * 5 + [169]
    assert {span.tier for one in results[1:] for span in one.spans[:1]} == {"shared"}
    buffer = engine.runtime.pool.bytes_for(1)
    assert max(held) <= 7 * buffer  # a buffer of 256 rows each, 170 of them shared


def test_rows_are_kept_once_unless_others_wait_or_the_answer_is_long(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    def times_kept(*prompts: str, mode: str = "prefix_cache", **config: Any) -> int:
        engine = make(**config)
        engine.warm(TEXT[:96])
        calls: list[bool] = []
        admit = engine.runtime.store.admit

        def counted(*args: Any, **options: Any) -> int:
            calls.append(options["wait"])
            return admit(*args, **options)

        monkeypatch.setattr(engine.runtime.store, "admit", counted)
        results = engine.generate_batch(prompts, 4, mode, heal="off")
        assert all((result.moved_tokens > 0) == (mode != "prefix_cache") for result in results)
        return len(calls)

    new = TEXT[200:290], TEXT[300:390]
    assert times_kept(*new) == 2
    assert times_kept(*new, max_running=1) == 3  # the second waits while the first answers
    moved = [text[:20] + TEXT[:96] + text[20:] for text in new]
    config = {"mode": "chunk_kv_reuse", "reuse_moved": "always", "max_running": 1}
    assert times_kept(*moved, **config) == 2  # what was moved serves the second
    monkeypatch.setattr(decode, "KEPT_AFTER", 0.0)
    assert times_kept(*new) == 4


def test_salts_share_nothing_in_flight(make: Callable[..., KVBoost]) -> None:
    engine = make()
    prompts = [TEXT[:160]] * 4
    each = [{"cache_salt": salt} for salt in ("a", "b", "a", "b")]
    results = engine.generate_batch(prompts, 2, EXACT, each=each)  # type: ignore[arg-type]
    assert sorted(one.exact_tokens for one in results) == [0, 0, 159, 159]


def test_moved_text_of_a_batch_that_is_all_recomputed_is_a_full_prefill(
    make: Callable[..., KVBoost],
) -> None:
    engine = make(reuse_moved="always", recompute_strategy="query", recompute_ratio=1.0)
    engine.warm(TEXT[:96])
    prompts = [TEXT[500 + i : 520 + i] + TEXT[:96] + TEXT[600 : 620 + i] for i in range(4)]
    expected = [alone(engine, prompt, 6) for prompt in prompts]
    results = engine.generate_batch(prompts, 6)
    assert [one.token_ids for one in results] == expected
    for result, prompt in zip(results, prompts, strict=True):
        assert result.moved_tokens >= 64
        assert sum(span.num_tokens for span in result.spans) == len(prompt)


def test_a_stream_gives_its_pieces_and_its_times(make: Callable[..., KVBoost]) -> None:
    engine = make()

    async def read() -> None:
        async with engine.astream(TEXT[:50], 10) as stream:
            pieces = [piece async for piece in stream]
        result = stream.result
        assert "".join(pieces) == result.output_text and len(pieces) > 1
        assert result.finish_reason == "length"
        assert result.token_ids == alone(engine, TEXT[:50], 10)
        timings = vars(result.timings)
        phases = sum(ms for name, ms in timings.items() if name not in ("ttft_ms", "total_ms"))
        assert phases == pytest.approx(result.total_ms)
        assert 0 < result.ttft_ms < result.total_ms

    asyncio.run(read())


def test_many_streams_join_and_leave(make: Callable[..., KVBoost]) -> None:
    engine = make(max_running=5)
    prompts = [TEXT[i * 30 : i * 30 + 20 + 7 * i] for i in range(12)]
    expected = [alone(engine, prompt, 4 + index) for index, prompt in enumerate(prompts)]

    async def read(index: int, leave: bool) -> list[int] | None:
        await asyncio.sleep(0.002 * index)
        async with engine.astream(prompts[index], 4 + index, EXACT) as stream:
            async for _ in stream:
                if leave:
                    return None
        return stream.result.token_ids

    async def all_of_them() -> list[list[int] | None]:
        return await asyncio.gather(*(read(i, i % 3 == 1) for i in range(12)))

    got = asyncio.run(all_of_them())
    for index, tokens in enumerate(got):
        assert tokens is None if index % 3 == 1 else tokens == expected[index]
    stats = engine.serving_stats()
    assert stats["running"] == stats["waiting"] == stats["kv_bytes"] == 0
    assert max(stats["batch_sizes"]) <= 5


def test_the_processor_time_of_the_loop_is_counted(make: Callable[..., KVBoost]) -> None:
    engine = make()
    assert engine.serving_stats()["cpu_seconds"] == 0
    for _ in range(2):  # the second step begins after the first was counted
        engine.generate_batch([TEXT[:100], TEXT[:80]], 2)
    assert 0 < engine.serving_stats()["cpu_seconds"] < time.process_time()


def test_cancelling_frees_the_kv_and_keeps_what_was_read(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    slow_down(engine, monkeypatch)

    async def leave() -> None:
        stream = engine.astream(TEXT[:100], 100)
        await anext(stream)
        steps = engine.serving_stats()["steps"]
        await stream.aclose()
        stats = engine.serving_stats()
        assert stats["kv_bytes"] == 0 and stats["running"] == 0
        assert stats["steps"] <= steps + 2
        assert stream.result.finish_reason == "cancelled"
        assert [piece async for piece in stream] == []
        await stream.aclose()  # again

    asyncio.run(leave())
    assert engine.serving_stats()["finished"] == {"cancelled": 1}
    assert engine.generate(TEXT[:100], 1, EXACT).exact_tokens >= 96


def test_a_waiting_request_can_be_cancelled(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_running=1)
    slow_down(engine, monkeypatch)

    async def leave() -> None:
        first = engine.astream(TEXT[:20], 20)
        second = engine.astream(TEXT[30:50], 20)
        await second.aclose()
        assert second.result.finish_reason == "cancelled" and second.result.token_ids == []
        async for _ in first:
            pass
        assert len(first.result.token_ids) == 20

    asyncio.run(leave())


def test_a_request_that_has_ended_is_freed_without_the_garbage_collector(
    make: Callable[..., KVBoost],
) -> None:
    """It looks rarely through a process as large as a server, and a request holds its prompt, what
    was planned of it, and on a GPU some of its logits."""
    engine = make()
    freed = threading.Event()

    async def read() -> None:
        stream = engine.astream(TEXT[:40], 2)
        weakref.finalize(stream._state, freed.set)
        async for _ in stream:
            pass

    gc.disable()
    try:
        asyncio.run(read())
        assert freed.wait(20)
    finally:
        gc.enable()


def test_a_prompt_is_looked_up_when_it_arrives(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop only checks that what was found still holds."""
    engine = make()
    engine.generate(TEXT[:64], 1, EXACT)
    slow_down(engine, monkeypatch)
    catalogue = engine.runtime.store.holdings.catalogue
    searched: list[str] = []
    match = catalogue.match

    def watched(*given: Any) -> KnownRows:
        searched.append(threading.current_thread().name)
        return match(*given)

    async def ask() -> GenerationResult:
        first = engine.astream(TEXT[100:150], 20, ignore_eos=True)
        await anext(aiter(first))
        monkeypatch.setattr(catalogue, "match", watched)
        second = engine.astream(TEXT[:66], 4, EXACT, ignore_eos=True)
        async for _ in second:
            pass
        monkeypatch.setattr(catalogue, "match", match)
        await first.aclose()
        return second.result

    result = asyncio.run(ask())
    assert searched[0] == threading.main_thread().name and "kvboost-loop" not in searched
    assert result.exact_tokens == 64
    assert result.token_ids == alone(engine, TEXT[:66], 4, ignore_eos=True)


@on_buffers
def test_running_and_waiting_requests_time_out(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_running=1)
    slow_down(engine, monkeypatch, 0.05)

    async def wait() -> None:
        streams = [
            engine.astream(TEXT[place : place + 20], 200, timeout=seconds)
            for place, seconds in ((0, 2.0), (40, 1.0))
        ]
        for stream in streams:
            async for _ in stream:
                pass
        first, second = (stream.result for stream in streams)
        assert first.finish_reason == second.finish_reason == "timeout"
        assert 0 < len(first.token_ids) < 100 and second.token_ids == []
        with pytest.raises(ConfigError, match="timeout"):
            engine.astream(TEXT[:20], timeout=-1)

    asyncio.run(wait())


def test_a_full_queue_is_an_error_but_a_batch_waits(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(max_running=1, max_waiting=2)
    slow_down(engine, monkeypatch)

    async def fill() -> None:
        streams = []
        with pytest.raises(QueueFullError):
            for _ in range(5):
                streams.append(engine.astream(TEXT[:20], 20))
        assert len(streams) == 3
        for stream in streams:
            async for _ in stream:
                pass

    asyncio.run(fill())
    assert engine.serving_stats()["rejected"] == 1
    assert len(engine.generate_batch([TEXT[:20]] * 6, 2)) == 6


def test_a_request_that_can_never_fit_is_refused(make: Callable[..., KVBoost]) -> None:
    row = make().model.forward.shape.row_bytes
    engine = make(max_kv_bytes=100 * row)
    with pytest.raises(KVTooLargeError, match="120 tokens") as error:
        engine.generate_batch([TEXT[:100]], 20)
    assert error.value.needed == 120 * row and error.value.budget == 100 * row
    assert len(engine.generate_batch([TEXT[:40]] * 3, 20)) == 3


def test_draining_finishes_requests_and_takes_no_new_ones(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    slow_down(engine, monkeypatch)

    async def drain() -> None:
        stream = engine.astream(TEXT[:20], 20)
        assert not await engine.adrain(0.01)
        with pytest.raises(ShuttingDownError):
            engine.astream(TEXT[:20])
        assert await engine.adrain(10)
        async for _ in stream:
            pass
        assert len(stream.result.token_ids) == 20

    asyncio.run(drain())


def test_closing_cancels(make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(max_running=1)
    slow_down(engine, monkeypatch)

    async def close() -> None:
        streams = [engine.astream(TEXT[:20], 200), engine.astream(TEXT[:30], 200)]
        await anext(streams[0])
        await asyncio.to_thread(engine.close)
        for stream in streams:
            async for _ in stream:
                pass
            assert stream.result.finish_reason == "cancelled"

    asyncio.run(close())


def test_documents_are_warmed_while_requests_run(make: Callable[..., KVBoost]) -> None:
    engine = make()

    async def warm() -> tuple[int, int]:
        return await engine.awarm(TEXT[:100]), await engine.awarm(TEXT[:100])

    new, again = asyncio.run(warm())
    assert new > 0 and again == 0
    assert engine.generate([*TEXT[:100], 1], 1, EXACT).exact_tokens == 100


def test_a_bad_batch_is_refused(make: Callable[..., KVBoost]) -> None:
    engine = make()
    with pytest.raises(PromptError, match="several prompts"):
        engine.generate_batch("one")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="each has 1 entries for 2"):
        engine.generate_batch([TEXT[:5]] * 2, each=[{}])
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        engine.generate_batch([TEXT[:5]], each=[{"colour": 1}])  # type: ignore[typeddict-unknown-key]
    with pytest.raises(ConfigError, match="logit_bias"):
        engine.generate([1, 2], logit_bias={99_999: 1.0})
    with pytest.raises(PromptError):
        engine.generate_batch([TEXT[: CONTEXT + 5]])
    assert engine.generate_batch([]) == []
    assert engine.serving_stats()["waiting"] == 0
