"""What is refused before any process starts, and what happens when a process is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from kvboost import KVBoost
from kvboost.errors import ConfigError, RankLostError, UnsupportedModelError
from kvboost.runtime.parallel import runtime
from kvboost.runtime.parallel.ranks import Ranks
from kvboost.runtime.parallel.runtime import ParallelRuntime
from support.split_models import save_model
from support.tiny import DEVICE

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. "


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def engine(models: Path) -> Iterator[KVBoost]:
    if DEVICE != "cpu":
        pytest.skip("it needs a GPU for each rank")
    folder = save_model("llama", models)
    with KVBoost.from_pretrained(folder, dtype="float32", tp_size=2, chunk_size=16) as made:
        yield made
    assert not distributed.is_initialized()
    ranks = ranks_of(made)
    assert all(process.returncode is not None for process in ranks.processes)


def ranks_of(engine: KVBoost) -> Ranks:
    assert isinstance(engine.runtime, ParallelRuntime)
    return engine.runtime.ranks


@pytest.mark.parametrize(
    ("name", "tp_size", "options", "message"),
    [
        ("llama", 4, {}, r"tp_size=4 does not divide the 2 KV heads of .*use one of 1, 2$"),
        ("llama", 3, {}, r"tp_size=3 .* use one of 1, 2$"),
        ("llama", 0, {}, r"tp_size=0"),
        ("llama", 2, {"device_map": "auto"}, "device_map and tp_size=2 exclude each other"),
        ("llama", 2, {"gguf_file": "model.gguf"}, "gguf_file and tp_size=2 exclude each other"),
    ],
)
def test_a_size_that_cannot_be_is_refused_before_anything_starts(
    name: str,
    tp_size: int,
    options: Any,
    message: str,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runtime, "open_ranks", None)
    with pytest.raises(ConfigError, match=message):
        KVBoost.from_pretrained(save_model(name, models), tp_size=tp_size, **options)


def test_a_model_without_a_plan_is_refused(models: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no tensor-parallel plan .* use tp_size=1"):
        KVBoost.from_pretrained(save_model("stablelm", models), tp_size=2)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_a_model_whose_layers_differ_is_refused(name: str, models: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers of model type .* use tp_size=1"):
        KVBoost.from_pretrained(save_model(name, models), tp_size=2)


def test_quantised_weights_are_refused(models: Path, tmp_path: Path) -> None:
    config = json.loads((save_model("llama", models) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"tp_size=2: .* quantised.* use tp_size=1"):
        KVBoost.from_pretrained(tmp_path, tp_size=2)


def test_a_killed_rank_ends_requests_with_an_error(engine: KVBoost, models: Path) -> None:
    assert engine.generate(TEXT, 4).token_ids and engine.failure is None
    with pytest.raises(ConfigError, match="close the other engine with tp_size first"):
        KVBoost.from_pretrained(save_model("llama", models), tp_size=2)
    stream = engine.stream(TEXT + "More.", 200, ignore_eos=True)
    next(stream)
    ranks_of(engine).processes[0].kill()
    with pytest.raises(RankLostError, match=r"rank 1 has ended with exit status -9.*another one"):
        list(stream)
    with pytest.raises(RankLostError, match="rank 1 has ended"):
        engine.generate_batch([TEXT, TEXT + "Else."], 4)
    assert isinstance(engine.failure, RankLostError)
