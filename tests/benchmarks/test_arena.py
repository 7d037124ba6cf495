"""KVShareArena's contract, called in the order of its harness."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from types import ModuleType

import pytest
from rich.console import Console

from benchmarks import arena
from benchmarks.entries import BENCHMARKS
from kvboost import KVBoost
from kvboost.errors import ConfigError
from support.passages import text
from support.tiny import byte_tokenizer, tiny_model

EXAM = {
    "system_prompt": "You answer.",
    "pre_ctx": "These are passages.\n",
    "mid_q": "\n\nAnswer the question.\n\nQuestion: ",
    "tail": "\nAnswer:",
    "max_new_tokens": 4,
}
SOURCES = [text(name, 60) for name in ("first", "second", "third")]
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def asked(folder: str, question: str = "Who?", *, read: bool = True, **options) -> arena.Answer:
    method, config = arena.Method(), {"exam": EXAM, "dtype": "float32", **options}
    method.setup(folder, config)
    caches = [method.build_cache(source) if read else list(source.encode()) for source in SOURCES]
    answer = method.answer(question, caches, config)
    method.teardown()
    return answer


def test_sources_are_reused_and_what_they_cost_is_told(folder: str) -> None:
    answer = asked(folder)
    tokens = sum(len(source.encode()) for source in SOURCES)
    assert answer.dense_payload_layer_tokens == LAYERS * tokens
    assert 0 < answer.recomputed_layer_tokens < 0.6 * answer.dense_payload_layer_tokens
    assert answer.kv_bytes == tokens * LAYERS * 2 * 2 * 16 * 4  # sides, heads, size, float32
    assert answer.ttft_ms > 0 and answer.aux["moved_tokens"] > 300
    assert answer.aux["exact_tokens"] > 200  # the beginning, and the first source


def test_sources_that_were_not_read_are_computed_and_counted(folder: str) -> None:
    answer = asked(folder, read=False)
    assert answer.recomputed_layer_tokens == answer.dense_payload_layer_tokens


def test_options_change_how_sources_are_repaired(folder: str) -> None:
    free = asked(folder, recompute_strategy="none")
    whole = asked(folder, recompute_strategy="cacheblend", recompute_ratio=1.0)
    assert free.recomputed_layer_tokens == 0 < whole.recomputed_layer_tokens
    said = EXAM["pre_ctx"] + "".join(SOURCES) + EXAM["mid_q"] + "Who?" + EXAM["tail"]
    messages = [
        {"role": "system", "content": EXAM["system_prompt"]},
        {"role": "user", "content": said},
    ]
    with KVBoost.from_pretrained(folder, dtype="float32") as engine:
        assert engine.chat(messages, 4, "baseline").output_text == whole.text


def test_the_harness_is_given_the_method(folder: str, monkeypatch) -> None:
    registered, told = {}, {}

    class Base(ABC):
        @abstractmethod
        def setup(self, model_id, config): ...
        @abstractmethod
        def build_cache(self, source_text): ...
        @abstractmethod
        def answer(self, question, caches, config): ...

    def run(name, model_id, track, subset, n, data_dir, out, method_cfg):
        registered[name]()  # nothing of the contract is missing
        told.update(locals())
        return {"summary": {"n": n}}

    contract, harness = ModuleType("kvsharearena.contract"), ModuleType("kvsharearena.harness")
    contract.BaseRepairMethod, harness.run = Base, run
    contract.register = lambda name: lambda kind: registered.setdefault(name, kind)
    for module in (ModuleType("kvsharearena"), contract, harness):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    given = {"data": "D", "out": "F", "limit": 2, "options": '{"chunk_size": 64}'}
    settings = arena.Settings(model=folder, **given)
    report = BENCHMARKS["arena"].perform(settings, Console(quiet=True))
    assert report["summary"] == {"n": 2}
    assert (told["subset"], told["data_dir"], told["out"]) == ("hotpotqa", "D", "F")
    assert told["method_cfg"] == {"chunk_size": 64} and issubclass(registered["kvboost"], Base)


def test_the_missing_harness_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvsharearena", None)
    settings = arena.Settings(model="m", data="d", out="o")
    with pytest.raises(ConfigError, match="clone https://github"):
        BENCHMARKS["arena"].perform(settings, Console(quiet=True))
