from __future__ import annotations

import json

import pytest
import torch

from kvboost import ConfigError, KVBoost, ModelNotFoundError, StockModel, UnsupportedModelError
from kvboost.model.device import pick_device, pick_dtype
from tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as a hub would give it."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def no_home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))


def test_a_folder_loads_and_generates(folder) -> None:
    with KVBoost.from_pretrained(str(folder), dtype="float32", chunk_size=16) as engine:
        assert engine.dtype == torch.float32
        assert engine.context_length == 256
        ids = engine.encode("hello there")
        stock = StockModel.from_pretrained(str(folder), dtype="float32")
        assert engine.generate(ids, 5, ignore_eos=True).token_ids == stock.generate(ids, 5)
        assert engine.verify_correctness(8)


def test_the_default_dtype_runs_and_verifies(folder) -> None:
    with KVBoost.from_pretrained(str(folder)) as engine:
        assert engine.dtype in (torch.bfloat16, torch.float32)
        assert engine.verify_correctness(8)


def test_a_missing_folder_names_what_there_could_be() -> None:
    with pytest.raises(ModelNotFoundError, match=r"no model folder .*nowhere.*smollm2-135m"):
        KVBoost.from_pretrained("./nowhere")
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        KVBoost.from_pretrained("nowhere.gguf")


def test_a_folder_without_weights_says_so(folder, tmp_path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ModelNotFoundError, match="holds no model that transformers can load"):
        KVBoost.from_pretrained(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        KVBoost.from_pretrained(str(tmp_path / "empty"))


def test_a_hub_id_that_cannot_be_had_explains_itself() -> None:
    with pytest.raises(ModelNotFoundError, match=r"'nobody/nothing' is not a bundled name"):
        KVBoost.from_pretrained("nobody/nothing", local_files_only=True)


def test_an_architecture_is_refused_before_weights_are_read(tmp_path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="learned absolute"):
        KVBoost.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["", None, 5])
def test_what_is_no_name_is_refused(name) -> None:
    with pytest.raises(ConfigError, match="model_name="):
        KVBoost.from_pretrained(name)


def test_devices_and_dtypes_are_checked() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ConfigError, match="device='abacus'"):
        pick_device("abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            pick_device("cuda")
    assert pick_dtype(torch.float16, torch.device("cpu")) == torch.float16
    with pytest.raises(ConfigError, match="dtype='int3'"):
        pick_dtype("int3", torch.device("cpu"))


def test_an_adapter_beside_the_weights_changes_the_fingerprint() -> None:
    from kvboost.model.load import fingerprint

    plain, adapted = tiny_model("llama"), tiny_model("llama")
    adapted.model.layers[0].self_attn.lora_A = torch.nn.Linear(64, 2, bias=False)
    assert fingerprint(plain) != fingerprint(adapted)
