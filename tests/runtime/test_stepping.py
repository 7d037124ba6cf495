"""Steps of many requests: failures, long prompts, and answers between the parts of forwards."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import GenerationMode, KVBoost
from kvboost.model.execution.segment import Segment
from kvboost.runtime.decode import Drafts
from kvboost.runtime.devices import Cpu
from kvboost.runtime.scheduler import Patience, Scheduler
from kvboost.runtime.stepping import Stepper
from support.adapters import write_adapter
from support.batches import EXACT, TEXT, alone, on_buffers
from support.forwards import intercept
from support.requests import NoListener
from support.tiny import dynamic_model, longrope_model, make_engine, tiny_model

pytestmark = pytest.mark.usefixtures("share_short_beginnings", "nothing_shared")


@on_buffers
def test_running_requests_stay_within_max_kv_bytes(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = make().model.forward.shape.row_bytes
    engine = make(max_kv_bytes=3 * 256 * row)
    seen: list[int] = []

    def watching(run: Any, *given: Any) -> torch.Tensor:
        seen.append(engine.runtime.running.nbytes()[0])
        return run(*given)

    intercept(engine, monkeypatch, watching)
    prompts = [TEXT[i * 100 : i * 100 + 20 + 20 * i] for i in range(9)]
    expected = [alone(engine, prompt, 8) for prompt in prompts]
    seen.clear()
    assert [one.token_ids for one in engine.generate_batch(prompts, 8, EXACT)] == expected
    assert max(seen) == 3 * 256 * row
    assert max(engine.serving_stats()["batch_sizes"]) == 3


@on_buffers
def test_a_failing_request_does_not_affect_others(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    prompts = [TEXT[i * 50 : i * 50 + 30] for i in range(4)]
    bad = 255  # a token of no other prompt
    prompts[1].append(bad)
    expected = [alone(engine, prompt, 5) for prompt in prompts]

    def failing(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        if any(bad in one.token_ids.tolist() and len(one) > 1 for one in segments):
            raise RuntimeError("out of memory")
        return run(segments, cache)

    intercept(engine, monkeypatch, failing)

    async def read(prompt: list[int]) -> list[int] | str:
        try:
            async with engine.astream(prompt, 5, EXACT) as stream:
                async for _ in stream:
                    pass
        except RuntimeError as error:
            return str(error)
        return stream.result.token_ids

    async def all_of_them() -> list[list[int] | str]:
        return await asyncio.gather(*map(read, prompts))

    got = asyncio.run(all_of_them())
    assert got == [expected[0], "out of memory", *expected[2:]]
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate_batch(prompts, 5)
    assert engine.serving_stats()["finished"]["error"] == 2


@on_buffers
def test_a_request_under_repair_restarts_when_its_batch_fails(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow machine would give the two requests forwards of their own if pauses had a limit.
    engine = make(reuse_moved="always", max_pause=0.0)
    engine.warm(TEXT[:96])
    prompt = TEXT[500:520] + TEXT[:96] + TEXT[600:620]
    expected = engine.generate(prompt, 6, keep=False)
    assert expected.recomputed_tokens
    failed = []

    def failing(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        if len(segments) > 1 and any(one.hook is not None for one in segments) and not failed:
            run(segments, cache)  # the hook has done its work
            failed.append(True)
            raise RuntimeError("out of memory")
        return run(segments, cache)

    intercept(engine, monkeypatch, failing)
    prompts = [TEXT[2000:2020] + TEXT[:96] + TEXT[2020:2040], prompt]
    got = engine.generate_batch(prompts, 6, each=[{"keep": False}] * 2)
    assert failed
    assert got[1].token_ids == expected.token_ids
    assert got[1].recomputed_tokens == expected.recomputed_tokens


@on_buffers
def test_probes_share_a_forward_and_so_do_repairs(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As do rows of other prompts. All choose the rows that they choose alone."""
    monkeypatch.setattr("kvboost.runtime.prefill.YIELD_AFTER_SECONDS", math.inf)
    monkeypatch.setattr(Cpu, "step_rows", 1000)
    engine = make(reuse_moved="always", max_pause=0.0)
    engine.warm(TEXT[:160])
    moved = [TEXT[at : at + 20] + TEXT[:160] + TEXT[at + 50 : at + 80] for at in (500, 600, 700)]
    prompts = [*moved, TEXT[2000:2100]]
    expected = [engine.generate(prompt, 6, keep=False) for prompt in prompts]
    forwards: list[list[Any]] = []

    def watching(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        forwards.append(["probe" if one.until is not None else len(one) for one in segments])
        return run(segments, cache)

    intercept(engine, monkeypatch, watching)
    got = engine.generate_batch(prompts, 6, keep=False)
    repaired = [len(one.reuse.recomputed) + 50 for one in expected[:3]]
    assert forwards[:2] == [["probe"] * 3 + [100], repaired]
    for one, other in zip(got, expected, strict=True):
        assert one.reuse.recomputed == other.reuse.recomputed
        assert one.token_ids == other.token_ids
    assert all(one.recomputed_tokens for one in got[:3])


@on_buffers
def test_a_repair_waits_for_a_step_that_has_room_for_it(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step counts the rows of probes and of the repairs that follow them."""
    monkeypatch.setattr("kvboost.runtime.prefill.YIELD_AFTER_SECONDS", math.inf)
    monkeypatch.setattr(Cpu, "step_rows", 60)
    engine = make(reuse_moved="always", max_pause=0.0)
    engine.warm(TEXT[:160])
    steps: list[list[Any]] = []
    step = Stepper.step

    def stepping(stepper: Stepper) -> None:
        steps.append([])
        step(stepper)

    def watching(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        steps[-1].append([len(one) for one in segments if not one.decodes])
        return run(segments, cache)

    monkeypatch.setattr(Stepper, "step", stepping)
    intercept(engine, monkeypatch, watching)

    async def read() -> None:
        first = engine.astream(TEXT[2000:2040], 60, ignore_eos=True)
        await anext(first)
        moved = (TEXT[at : at + 20] + TEXT[:160] + TEXT[at + 50 : at + 66] for at in (500, 600))
        others = [engine.astream(prompt, 1, keep=False) for prompt in moved]
        for stream in (*others, first):
            async for _ in stream:
                pass
        assert all(stream.result.recomputed_tokens for stream in others)

    asyncio.run(read())
    rows = [[count for forward in forwards for count in forward] for forwards in steps[1:]]
    assert any(sum(counts) > 20 for counts in rows)
    assert all(sum(counts) <= 60 or len(counts) == 1 for counts in rows)


@on_buffers
def test_a_long_prompt_does_not_delay_requests_that_answer(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "step_rows", 10)
    engine = make()
    seen: list[tuple[int, int]] = []

    def watching(run: Any, segments: list[Segment], cache: Any) -> torch.Tensor:
        seen.append((sum(len(one) == 1 for one in segments), sum(map(len, segments))))
        return run(segments, cache)

    intercept(engine, monkeypatch, watching)

    async def read() -> None:
        first = engine.astream(TEXT[:20], 60)
        await anext(first)
        second = engine.astream(TEXT[100:300], 4)
        for stream in (second, first):
            async for _ in stream:
                pass

    asyncio.run(read())
    together = [rows for answering, rows in seen if answering and rows > 2]
    assert len(together) >= 15 and max(together) <= 11


@pytest.mark.parametrize("model", [longrope_model, dynamic_model])
def test_a_long_neighbour_does_not_change_how_short_prompts_rotate(
    model: Callable[[], Any],
) -> None:
    """Where rotation depends on the length of what is computed."""
    with make_engine(model()) as engine:
        limit = engine.model.support.reuse_limit
        assert limit is not None
        prompts = [TEXT[: limit + 9], TEXT[500:520], TEXT[600:630], TEXT[700 : 700 + limit - 3]]
        expected = [alone(engine, prompt, 6) for prompt in prompts]
        assert [one.token_ids for one in engine.generate_batch(prompts, 6, EXACT)] == expected
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert engine.generate(prompt, 6, EXACT).token_ids == tokens


def test_a_defect_in_the_loop_leaves_no_caller_waiting(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    with monkeypatch.context() as patched:

        def broken(*_: Any) -> list[Any]:
            raise MemoryError("no room for a thought")

        patched.setattr(Scheduler, "pick", broken)
        with pytest.raises(MemoryError):
            engine.generate_batch([TEXT[:20], TEXT[30:60]], 4)
    assert engine.generate_batch([TEXT[:20]], 4)[0].token_ids == alone(engine, TEXT[:20], 4)
    assert engine.serving_stats()["kv_bytes"] == 0


def answer_before_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets answers go on before every part of a forward, unless nothing limits their pauses."""
    monkeypatch.setattr(Patience, "is_over", lambda self: True)


@on_buffers
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mistral-window", "gpt2"])
def test_answers_go_on_between_the_layers_of_other_forwards(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step runs before every layer, the answers stay the same."""
    prompts = [TEXT[:40], TEXT[100:300], TEXT[:240], TEXT[500:530], TEXT[700:900]]
    monkeypatch.setattr(Cpu, "step_rows", 64)
    each = [{"max_new_tokens": tokens} for tokens in (40, 6, 5, 30, 6)]
    with make_engine(tiny_model(name), strict=False, max_pause=0.0) as engine:
        expected = [one.token_ids for one in engine.generate_batch(prompts, mode=EXACT, each=each)]
        assert engine.serving_stats()["steps_between_parts"] == 0
    answer_before_each_part(monkeypatch)
    with make_engine(tiny_model(name), strict=False) as engine:
        got = engine.generate_batch(prompts, mode=EXACT, each=each)
        assert [one.token_ids for one in got] == expected
        assert engine.serving_stats()["steps_between_parts"] > 10
        assert engine.serving_stats()["kv_bytes"] == 0
        assert engine.check_integrity() == []


@on_buffers
def test_a_repair_is_the_same_when_answers_go_on_between_its_layers(
    make: Callable[..., KVBoost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are adapters: those of the repaired request, and those of the answers in between."""
    prompt = TEXT[500:520] + TEXT[:180] + TEXT[600:620]

    async def ask(engine: KVBoost) -> list[list[int]]:
        streams = [
            engine.astream(TEXT[2000:2040], 60),
            engine.astream(TEXT[2100:2140], 60, adapter="other"),
        ]
        for stream in streams:
            await anext(stream)
        streams.append(engine.astream(prompt, 6, adapter="own", keep=False))
        for stream in reversed(streams):
            async for _ in stream:
                pass
        assert streams[-1].result.recomputed_tokens
        return [stream.result.token_ids for stream in streams]

    answers = []
    answer_before_each_part(monkeypatch)
    for max_pause in (0.0, 0.2):
        engine = make(reuse_moved="always", max_pause=max_pause)
        for seed, adapter in enumerate(("own", "other")):
            folder = write_adapter(tmp_path / adapter, engine.model.forward.model, seed=seed)
            engine.load_adapter(adapter, folder)
        engine.generate(TEXT[:180], 1, adapter="own")
        answers.append(asyncio.run(ask(engine)))
    assert answers[0] == answers[1]
    assert engine.serving_stats()["steps_between_parts"] > 0


@on_buffers
def test_embeddings_are_the_same_when_answers_go_on_between_their_layers(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_before_each_part(monkeypatch)
    engine = make()
    texts = [TEXT[:200], TEXT[300:320]]
    expected = engine.embedder.embed(texts)

    async def read() -> np.ndarray[Any, Any]:
        stream = engine.astream(TEXT[1000:1040], 60)
        await anext(stream)
        work = partial(engine.embedder.embed, texts)
        found = await asyncio.wrap_future(engine.between_steps(work))
        await stream.aclose()
        return found

    assert np.allclose(asyncio.run(read()), expected, atol=1e-5)
    assert engine.serving_stats()["steps_between_parts"] > 0


@on_buffers
def test_a_request_may_end_while_another_one_probes(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that probes goes on after a pause, and its forward lets the other one run to its
    end."""
    monkeypatch.setattr("kvboost.runtime.prefill.YIELD_AFTER_SECONDS", -1.0)
    monkeypatch.setattr("kvboost.runtime.scheduler.PATIENCE_SECONDS", -1.0)
    answer_before_each_part(monkeypatch)
    engine = make(reuse_moved="always")
    engine.generate(TEXT[:180], 1)
    moved, short = TEXT[500:520] + TEXT[:180] + TEXT[600:620], TEXT[700:710]
    alone = engine.generate(short, 14, ignore_eos=True).token_ids
    for number in range(10, 15):
        probing, other = engine.generate_batch(
            [moved, short],
            each=[{"max_new_tokens": 2, "keep": False}, {"max_new_tokens": number}],
            ignore_eos=True,
        )
        assert probing.recomputed_tokens and other.token_ids == alone[:number]


class Begun(NoListener):
    """Notes when an answer has begun."""

    event_loop = None

    def __init__(self) -> None:
        self.is_answered = threading.Event()

    def push(self, pieces: Any) -> None:
        self.is_answered.set()


@on_buffers
def test_a_cancelled_answer_does_not_go_on_between_the_layers_of_another_forward(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()

    async def read() -> int:
        listener, cancelled = Begun(), threading.Event()
        cancel = engine.answer_to(lambda state: listener, TEXT[:40], 100, EXACT, ignore_eos=True)
        assert listener.is_answered.wait(60)

        def cancel_first(run: Any, segments: list[Segment], *rest: Any) -> torch.Tensor:
            if sum(map(len, segments)) > 50 and not cancelled.is_set():
                answer_before_each_part(monkeypatch)
                cancel()
                cancelled.set()
            return run(segments, *rest)

        intercept(engine, monkeypatch, cancel_first)
        before = engine.serving_stats()["steps_between_parts"]
        async for _ in engine.astream(TEXT[100:300], 1):
            pass
        assert cancelled.is_set()
        return engine.serving_stats()["steps_between_parts"] - before

    monkeypatch.setattr(Patience, "is_over", lambda self: False)
    monkeypatch.setattr(Patience, "allows", lambda self, rows, keys: False)
    assert asyncio.run(read()) == 0


@on_buffers
def test_without_a_limit_embeddings_are_not_interrupted(
    make: Callable[..., KVBoost],
) -> None:
    """Also those of a model of their own, which calls it before each layer."""
    engine = make(max_pause=0.0)

    async def read() -> None:
        stream = engine.astream(TEXT[1000:1040], 60)
        await anext(stream)
        await asyncio.wrap_future(engine.between_steps(engine.answer_meanwhile))
        await stream.aclose()

    asyncio.run(read())
    assert engine.serving_stats()["steps_between_parts"] == 0


def test_the_first_token_is_shown_before_the_prompt_is_searched_for_a_draft(
    make: Callable[..., KVBoost], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    shown = threading.Event()
    was_shown: list[bool] = []
    draft = Drafts.draft

    def drafted(self: Drafts, *args: Any) -> list[int]:
        was_shown.append(shown.wait(30))
        return draft(self, *args)

    async def read() -> None:
        async for _ in engine.astream(TEXT[:64], 4, ignore_eos=True, logit_bias={65: 100.0}):
            shown.set()

    monkeypatch.setattr(Drafts, "draft", drafted)
    asyncio.run(read())
    assert was_shown and all(was_shown)


@pytest.mark.parametrize("batched", [True, False])
def test_a_cancelled_request_keeps_only_computed_rows(
    make: Callable[..., KVBoost], batched: bool
) -> None:
    engine = make()
    prompt = TEXT[:50]

    async def leave() -> list[int]:
        stream = engine.astream(prompt, 40, EXACT, ignore_eos=True)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        return stream.result.token_ids

    if batched:
        said = asyncio.run(leave())
    else:
        with engine.stream(prompt, 40, EXACT, ignore_eos=True) as stream:
            for _ in range(3):
                next(stream)
        assert stream.result.finish_reason == "cancelled"
        said = stream.result.token_ids
    assert engine.cache_stats()["in_use"] == 0
    goes_on = [*prompt, *said, *TEXT[900:910]]
    full = engine.score(goes_on, [1, 2], GenerationMode.BASELINE)
    ours = engine.score(goes_on, [1, 2], EXACT)
    assert ours.reuse.cached_tokens >= len(prompt)
    assert torch.allclose(full.logits, ours.logits, atol=1e-4)
