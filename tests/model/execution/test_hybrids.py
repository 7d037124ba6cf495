"""Models whose layers keep states: each family of ``support/hybrids.py``, in float32.

Every test compares with stock transformers. What is reused ends where states are kept.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvboost import (
    ConfigError,
    GenerationMode,
    GenerationResult,
    KVBoost,
    SpanKind,
    StockModel,
    UnsupportedModelError,
)
from kvboost.errors import ModelError
from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import RowStates, StackedStates, StateLost
from kvboost.model.fit.features import features
from kvboost.model.loading.load import wrap
from support.adapters import check_merged, write_adapter
from support.families import family_model
from support.hybrids import HERE, HYBRIDS, SEEING_HYBRIDS, hybrid_model, save_seeing
from support.tiny import byte_tokenizer, make_engine, random_ids

BASELINE, EXACT, MOVED = GenerationMode
MECHANISMS = ("bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next", "zaya")
"""Mamba 2, alone and beside attention; Mamba 1; convolutions; a delta rule; states of keys."""
EVERY = 16
CLOSE = {"atol": 1e-3, "rtol": 0}


@pytest.mark.parametrize("name", HERE)
def test_family(name: str, tmp_path: Path) -> None:
    model = hybrid_model(name)
    stock = StockModel(copy.deepcopy(model))
    with make_engine(model, state_every=EVERY) as engine:
        check_any_rows(engine, stock)
        check_shared_steps(engine)
        check_conversation(engine, stock)
        if name in MECHANISMS:
            check_exact_reuse(engine, stock)
            check_batch(engine, stock)
        check_adapters(engine, stock, tmp_path)
        assert engine.check_integrity() == []


def check_any_rows(engine: KVBoost, stock: StockModel) -> None:
    """Rows in pieces of any length, single ones too, give the logits of one forward."""
    forward, ids = engine.model.forward, random_ids(40, seed=2)
    kv = make_kv(forward.shape, len(ids))
    bounds = [0, 1, 2, 18, 19, 35, 40]
    logits = [
        forward([Segment(kv, torch.tensor(ids[start:end]), range(start, end), end - start)])
        for start, end in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(logits), stock.logits(ids), **CLOSE)


STEPS = ((0, 1), (0, 1), (2, 0, 1), (1, 2), (1,), (2, 1), (0, 2, 1), (1, 2))
"""Which of three requests answer in each step: one begins, leaves, or rests, in any order."""


def check_shared_steps(engine: KVBoost, *adapters: AppliedAdapter | None) -> None:
    """Answers of requests that come and go are those of each alone, with the same states."""
    forward, given = engine.model.forward, adapters or (None,) * 3
    assert forward.shares_steps and features(forward.model.config).batch.startswith("answers")
    together, num_together = answer_in_steps(forward, given)
    forward.shares_steps = False
    alone, num_alone = answer_in_steps(forward, given)
    forward.shares_steps = True
    assert num_alone == sum(map(len, STEPS)) and num_together == len(STEPS)
    for (ids, logits, states), (own_ids, own_logits, own_states) in zip(
        together, alone, strict=True
    ):
        assert ids == own_ids
        torch.testing.assert_close(logits, own_logits, atol=1e-4, rtol=0)
        assert states.known_rows(99, current=True) == own_states.known_rows(99, current=True) != []
        for row in states.known_rows(99, current=True):
            torch.testing.assert_close(states.at(row), own_states.at(row), atol=1e-4, rtol=1e-4)


Answered = tuple[list[int], torch.Tensor, RowStates]


def answer_in_steps(
    forward: Forward, adapters: Sequence[AppliedAdapter | None]
) -> tuple[list[Answered], int]:
    """The greedy answers of three requests, with their logits and states, and how often the layers
    ran for them."""
    kvs, ids, found = [], [], []
    for length, adapter in zip((40, 9, 30), adapters, strict=True):
        kv = make_kv(forward.shape, 64)
        kv.adapter = adapter
        kv.states = RowStates(forward.states, every=4)
        prompt = torch.tensor(random_ids(length, seed=length))
        found.append([forward([Segment(kv, prompt, range(length))])])
        kvs.append(kv)
        ids.append([*prompt.tolist(), int(found[-1][0].argmax())])
    calls: list[int] = []
    handle = forward.model.register_forward_pre_hook(lambda *_: calls.append(1))
    for step in STEPS:
        segments = [
            Segment(
                kvs[one],
                torch.tensor(ids[one][-1:]),
                range(len(ids[one]) - 1, len(ids[one])),
                decodes=True,
            )
            for one in step
        ]
        for one, logits in zip(step, forward.run(segments), strict=True):
            found[one].append(logits)
            ids[one].append(int(logits.argmax()))
    handle.remove()
    states = [kv.states for kv in kvs if kv.states is not None]
    return list(zip(ids, map(torch.cat, found), states, strict=True)), len(calls)


def check_exact_reuse(engine: KVBoost, stock: StockModel) -> None:
    """After text that was read up to any row, from the last states at or below it."""
    ids = random_ids(50, seed=1)
    logits = stock.logits(ids)[34:]
    for known, reused in ((0, 0), (17, 17), (29, 29), (35, 32), (50, 32)):
        salt = str(known)
        engine.warm(ids[:known], cache_salt=salt) if known else None
        scored = engine.score(ids[:35], [*ids[35:], 0], EXACT, cache_salt=salt)
        spans = scored.reuse.spans
        assert sum(s.num_tokens for s in spans if s.kind is SpanKind.EXACT) == reused
        torch.testing.assert_close(scored.logits, logits, **CLOSE)


def check_conversation(engine: KVBoost, stock: StockModel) -> None:
    """Each turn goes on where the answer before it ended."""
    ids, known = random_ids(20, seed=3), 0
    for turn in range(2):
        answer = engine.generate(ids, 5, EXACT, ignore_eos=True)
        assert answer.cached_tokens == known
        logits = stock.logits([*ids, *answer.token_ids])[len(ids) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        known = len(ids) + 4
        ids = [*ids, *answer.token_ids, *random_ids(9, seed=10 + turn)]


def check_batch(engine: KVBoost, stock: StockModel) -> None:
    prompts = [random_ids(length, seed=length) for length in (40, 9, 30)]
    batched = engine.generate_batch(prompts, 3, EXACT, ignore_eos=True)
    for prompt, answer in zip(prompts, batched, strict=True):
        assert answer.token_ids == greedy(stock, prompt, answer.token_ids)
    again = engine.generate_batch(prompts, 3, EXACT, ignore_eos=True)
    assert [one.token_ids for one in again] == [one.token_ids for one in batched]
    assert [one.cached_tokens for one in again] == [39, 0, 29]


def check_adapters(engine: KVBoost, stock: StockModel, folder: Path) -> None:
    """An adapter of all projections of attention equals the same adapter merged by hand."""
    if not stock.model.config.model_type.startswith("zamba"):  # its layers have weights together
        check_merged(engine, stock, folder, ["q_proj", "k_proj", "v_proj"])


@pytest.mark.parametrize("name", sorted(SEEING_HYBRIDS))
def test_a_model_that_sees_reads_text(name: str, tmp_path: Path) -> None:
    save_seeing(name, tmp_path)
    config = {"chunk_size": 16, "dtype": "float32", "state_every": EVERY}
    with KVBoost.from_pretrained(tmp_path, **config) as engine:
        assert engine.model.forward.shares_steps
        ids = random_ids(40, seed=1)
        first = engine.generate(ids, 3, EXACT, ignore_eos=True)
        again = engine.generate(ids, 3, EXACT, ignore_eos=True)
        assert (first.cached_tokens, again.cached_tokens) == (0, 39)
        assert again.token_ids == first.token_ids


def test_layers_with_windows() -> None:
    windows = {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window": 12}
    model = family_model("zaya", {**HYBRIDS["zaya"], **windows})
    with make_engine(model, state_every=EVERY) as engine:
        check_any_rows(engine, StockModel(copy.deepcopy(model)))
        check_shared_steps(engine)


def test_requests_of_other_adapters(tmp_path: Path) -> None:
    model = hybrid_model("falcon_h1")
    with make_engine(model, state_every=EVERY) as engine:
        adapters = []
        for seed, targets in ((1, ["q_proj", "in_proj"]), (2, ["in_proj", "down_proj"])):
            folder = write_adapter(tmp_path / str(seed), model, seed=seed, targets=targets)
            adapter = engine.model.forward.load_adapter(read_adapter(folder))
            adapters.append(AppliedAdapter(adapter))
        check_shared_steps(engine, adapters[0], None, adapters[1])


def test_text_that_moved_is_read_again() -> None:
    with make_engine(hybrid_model("lfm2")) as engine:
        first, second = random_ids(60, 1), random_ids(60, 2)
        engine.warm([*first, *second])
        answer = engine.generate([*second, *first], 3, MOVED, ignore_eos=True)
        assert (answer.cached_tokens, answer.moved_tokens) == (0, 0)
        assert any("which do not move" in note for note in answer.reuse.notes)
        assert engine.model.rotation is None


def test_a_failed_forward_loses_the_states() -> None:
    model = hybrid_model("lfm2")
    with make_engine(model) as engine:
        forward, ids = engine.model.forward, torch.tensor(random_ids(20, seed=1))
        kv = make_kv(forward.shape, 20)
        forward([Segment(kv, ids[:10], range(10))])
        broken = model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward([Segment(kv, ids[10:], range(10, 20))])
        broken.remove()
        assert kv.states is not None and kv.states.known_rows(20, current=True) == []
        with pytest.raises(StateLost, match="send it again"):
            forward([Segment(kv, ids[10:], range(10, 20))])
        whole = forward([Segment(kv, ids, range(20))])
        torch.testing.assert_close(whole[0], StockModel(model).logits(ids.tolist())[-1], **CLOSE)


def test_the_rows_of_a_batch_go_through_the_layers_once() -> None:
    """If one request of a batch fails, the others are asked for the same rows again."""
    with make_engine(hybrid_model("bamba")) as engine:
        forward, ids = engine.model.forward, torch.tensor(random_ids(20, seed=1))
        kv = make_kv(forward.shape, 20)
        segment = Segment(kv, ids[:10], range(10))
        first = forward([segment])
        assert forward([segment]) is not None and torch.equal(forward([segment]), first)
        forward([Segment(kv, ids[10:], range(10, 20))])
        with pytest.raises(StateLost):
            forward([Segment(kv, ids[10:], range(10, 20))])


def test_answers_run_beside_a_prompt_and_go_on_from_where_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is cancelled, and one begins meanwhile. The next turns use the states at the ends."""

    async def main(engine: KVBoost) -> list[GenerationResult]:
        streams = []
        for length, count in ((40, 12), (25, 30), (30, 9)):
            prompt = random_ids(length, length)
            streams.append(engine.astream(prompt, count, EXACT, ignore_eos=True))
            async for _ in streams[-1]:
                break
        await streams[1].aclose()
        for one in (0, 2):
            async for _ in streams[one]:
                pass
        return [one.result for one in streams]

    model = hybrid_model("qwen3_next")
    stock = StockModel(copy.deepcopy(model))
    with make_engine(model, state_every=64) as engine:
        forward = engine.model.forward
        shared: list[int] = []
        compute = forward._steps.compute

        def count(segments: Sequence[Segment]) -> tuple[StackedStates, torch.Tensor]:
            shared.append(len(segments))
            return compute(segments)

        monkeypatch.setattr(forward._steps, "compute", count)
        for length, result in zip((40, 25, 30), asyncio.run(main(engine)), strict=True):
            prompt = random_ids(length, length)
            assert result.token_ids == greedy(stock, prompt, result.token_ids)
            ids = [*prompt, *result.token_ids, 7, 8, 9]
            again = engine.generate(ids, 3, EXACT, ignore_eos=True)
            assert again.cached_tokens >= len(ids) - 5
            assert again.token_ids == greedy(stock, ids, again.token_ids)
        assert shared and engine.check_integrity() == []


def test_answers_go_on_between_the_layers_of_a_prompt() -> None:
    model = hybrid_model("qwen3_next")
    stock = StockModel(copy.deepcopy(model))
    with make_engine(model) as engine:
        forward, prompts = engine.model.forward, [random_ids(length, 1) for length in (20, 9)]
        kvs = [make_kv(forward.shape, 64) for _ in range(3)]
        for kv, ids in zip(kvs, prompts, strict=False):
            forward([Segment(kv, torch.tensor(ids), range(len(ids)))])
        answered: list[torch.Tensor] = []

        def answer() -> None:
            forward.between_parts = None
            token = torch.tensor([5])
            answered.append(
                forward(
                    [
                        Segment(kv, token, range(len(ids), len(ids) + 1), decodes=True)
                        for kv, ids in zip(kvs, prompts, strict=False)
                    ]
                )
            )
            for ids in prompts:
                ids.append(5)
            forward.between_parts = answer

        ids = random_ids(30, 2)
        forward.between_parts = answer
        read = forward([Segment(kvs[2], torch.tensor(ids), range(30), 30)])
        forward.between_parts = None
        assert len(answered) > 2
        torch.testing.assert_close(read, stock.logits(ids), **CLOSE)
        for number, ids in enumerate(prompts):
            logits = torch.stack([both[number] for both in answered])
            torch.testing.assert_close(logits, stock.logits(ids)[-len(answered) :], **CLOSE)


def test_two_engines_on_one_model_answer_at_the_same_time() -> None:
    """Steps that requests share replace the model's attention, for both."""
    model = hybrid_model("lfm2")
    prompts = [random_ids(length, length) for length in (20, 9, 31)]
    options = {"keep": False, "ignore_eos": True}
    with make_engine(model) as first, make_engine(model) as second:
        expected = [first.generate(ids, 12, EXACT, **options).token_ids for ids in prompts]

        def answer(engine: KVBoost) -> list[list[int]]:
            rounds = [engine.generate_batch(prompts, 12, EXACT, **options) for _ in range(4)]
            return [one.token_ids for answers in rounds for one in answers]

        with ThreadPoolExecutor(2) as threads:
            answers = list(threads.map(answer, (first, second)))
    assert answers == [expected * 4] * 2
    assert model.config._attn_implementation == "sdpa"


def test_a_step_that_fails_loses_no_states() -> None:
    model = hybrid_model("bamba")
    stock = StockModel(copy.deepcopy(model))
    prompts = [random_ids(length, seed=length) for length in (40, 9, 30)]

    failed: list[int] = []

    def fail(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if len(given[0]) > 1:
            failed.append(len(given[0]))
            raise RuntimeError("no memory")

    with make_engine(model, state_every=EVERY) as engine:
        handle = model.model.layers[-1].register_forward_pre_hook(fail)
        answers = engine.generate_batch(prompts, 4, EXACT, ignore_eos=True)
        handle.remove()
        assert failed
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == greedy(stock, prompt, answer.token_ids)


@pytest.mark.parametrize("fails", [True, False])
def test_a_model_that_takes_one_sequence_at_a_time(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its layer with states raises an error for several, or mixes them up."""
    model = hybrid_model("jamba")
    stock = StockModel(copy.deepcopy(model))

    def break_several(module: torch.nn.Module, given: object, out: torch.Tensor) -> torch.Tensor:
        if fails and len(out) > 1:
            raise RuntimeError("one sequence only")
        return out.flip(0)

    model.model.layers[0].mamba.register_forward_hook(break_several)
    with make_engine(model, state_every=EVERY) as engine:
        assert not engine.model.forward.shares_steps
        assert ("one sequence only" if fails else "are off by") in caplog.text
        assert any("one request after another is answered" in note for note in engine.notes)
        check_batch(engine, stock)


def greedy(stock: StockModel, prompt: list[int], answer: list[int]) -> list[int]:
    """The tokens that are likeliest after each of these."""
    return stock.logits([*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()


def test_what_needs_rows_everywhere_is_refused(tmp_path: Path) -> None:
    model = hybrid_model("lfm2")
    with pytest.raises(ConfigError, match="cannot be streamed"):
        wrap(model, byte_tokenizer(), move=lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="far_kv_bytes"):
        make_engine(model, far_kv_bytes="1GiB")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="do not stay packed"):
        KVBoost.from_pretrained(tmp_path, weights="packed")
    with pytest.raises((UnsupportedModelError, ConfigError), match="tp_size=2"):
        KVBoost.from_pretrained(tmp_path, tp_size=2)
    with pytest.raises(ConfigError, match=r"draft_model=.* keeps states"):
        make_engine(model, draft_model=tmp_path, speculate=4)
