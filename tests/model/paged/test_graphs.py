"""CUDA graphs on a real GPU: graph, eager and stock give the same, in float32."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from kvboost import KVBoost, StockModel
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.paged.graphs import Function, GraphCapture
from support.paged_engines import leaks, steps_of
from support.tiny import (
    ALL_MODELS,
    DEVICE,
    OTHER_MODELS,
    dynamic_model,
    make_engine,
    random_ids,
    tiny_model,
)

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")

BUFFERED = {"gemma3n_text", "gemma4_text", "llama4_text"}
"""Their requests have no pages."""
PAGED = [name for name in ALL_MODELS if ARCHITECTURES[name.split("-")[0]].packed]
NAMES = [name for name in PAGED if name not in BUFFERED]
EAGER = {"mixtral", "glm4_moe"}
"""Models that choose their experts on the host cannot be captured."""
TOKENS = 8


def engine_of(name: str, graphs: str, **config: Any) -> KVBoost:
    strict = name not in OTHER_MODELS
    return make_engine(tiny_model(name), strict=strict, graphs=graphs, **config)


def greedy(stock: StockModel, ids: list[int]) -> list[int]:
    """The likeliest tokens after ``ids``. ``StockModel.generate`` would avoid the end of text."""
    answer: list[int] = []
    while len(answer) < TOKENS:
        answer.append(stock.next_token([*ids, *answer]))
    return answer


@pytest.mark.parametrize("name", NAMES)
def test_graph_eager_and_stock_agree(name: str) -> None:
    ids = random_ids(70, seed=3)
    stock = StockModel(tiny_model(name))
    expected = greedy(stock, ids)
    logits = stock.logits([*ids, *expected])[len(ids) - 1 : -1].log_softmax(-1).cpu()
    for graphs in ("auto", "off"):
        with engine_of(name, graphs) as engine:
            assert engine.generate(ids, TOKENS, ignore_eos=True).token_ids == expected
            scored = engine.generate(ids, TOKENS, "baseline", ignore_eos=True, logprobs=1)
            assert scored.token_ids == expected and scored.logprobs is not None
            for row, (token, found) in zip(
                logits, zip(expected, scored.logprobs, strict=True), strict=True
            ):
                assert float(row[token]) == pytest.approx(found.logprob, abs=1e-3)
            steps = steps_of(engine)
            assert steps.num_steps >= TOKENS - 1 and steps.num_ahead > 0
            capture: Any = steps.capture
            if graphs == "off":
                assert capture.note == "graphs='off'"
            elif name in EAGER:  # only sampling is captured, and the engine says so
                assert "no CUDA graph of the model: " in capture.note
                assert capture.note in " ".join(engine.notes) and capture.num_graphs >= 1
            else:
                assert capture.note is None and capture.num_graphs >= 2
            assert leaks(engine) == []


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
def test_a_batch_equals_one_by_one(name: str) -> None:
    prompts = [random_ids(length, seed=length) for length in (5, 40, 61, 90, 33, 12, 70)]
    with engine_of(name, "auto") as engine:
        alone = [
            engine.generate(ids, TOKENS, "baseline", ignore_eos=True).token_ids for ids in prompts
        ]
        together = engine.generate_batch(prompts, TOKENS, "baseline", ignore_eos=True)
        assert [result.token_ids for result in together] == alone
        assert any(size > 1 for size, *_ in steps_of(engine)._buckets)
        each: list[Any] = [
            {"temperature": 2.0, "top_k": 30, "seed": n} for n in range(len(prompts))
        ]
        drawn = engine.generate_batch(prompts, TOKENS, "baseline", each=each, ignore_eos=True)
        for ids, own, result in zip(prompts, each, drawn, strict=True):
            again = engine.generate(ids, TOKENS, "baseline", ignore_eos=True, **own)
            assert again.token_ids == result.token_ids
        assert leaks(engine) == []


def test_requests_that_join_and_leave_do_not_change_each_other() -> None:
    """Answers of different lengths: steps of many sizes, most launched ahead."""
    prompts = [random_ids(20 + 3 * n, seed=n) for n in range(9)]
    lengths = [3 + 7 * n for n in range(9)]
    with engine_of("qwen2", "auto") as engine:
        each: list[Any] = [{"max_new_tokens": length} for length in lengths]
        together = engine.generate_batch(prompts, each=each, ignore_eos=True)
        for ids, length, result in zip(prompts, lengths, together, strict=True):
            alone = engine.generate(ids, length, "baseline", ignore_eos=True)
            assert alone.token_ids == result.token_ids and len(result.token_ids) == length
        assert steps_of(engine).num_ahead > 20
        assert leaks(engine) == []


def test_a_model_that_cannot_be_captured_runs_without_graphs() -> None:
    with make_engine(dynamic_model()) as engine:
        result = engine.generate(random_ids(40, seed=1), 4, ignore_eos=True)
        assert len(result.token_ids) == 4


def test_a_function_that_waits_for_the_gpu_is_not_captured() -> None:
    capture = GraphCapture(torch.device(DEVICE))
    numbers = torch.arange(3, device=DEVICE)

    def waits() -> torch.Tensor:
        return numbers * int(numbers.sum())

    assert capture(waits, "what waits") is waits
    assert str(capture.note).startswith("no CUDA graph of what waits: ")
    assert capture(waits, "what waits") is waits  # it is not tried again
    assert waits().tolist() == [0, 3, 6]


def test_a_replay_reads_what_the_buffers_hold_then() -> None:
    capture = GraphCapture(torch.device(DEVICE))
    numbers = torch.arange(3, device=DEVICE)
    double = capture(lambda: numbers * 2, "a product")
    assert capture.num_graphs == 1
    numbers.fill_(5)
    assert double().tolist() == [10, 10, 10]


def test_a_graph_keeps_what_its_function_holds() -> None:
    capture = GraphCapture(torch.device(DEVICE))

    def make() -> Function:
        numbers = torch.arange(1 << 16, device=DEVICE)
        return capture(lambda: numbers * 2, "a product")

    double = make()
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE) for _ in range(64)]
    assert double().tolist() == list(range(0, 1 << 17, 2)) and len(others) == 64


def test_no_graph_is_recorded_beyond_the_budget() -> None:
    capture = GraphCapture(torch.device(DEVICE), max_bytes=-1)

    def function() -> torch.Tensor:
        return torch.ones(1, device=DEVICE)

    assert capture(function, "ones") is function and "more than" in str(capture.note)
