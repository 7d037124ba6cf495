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
