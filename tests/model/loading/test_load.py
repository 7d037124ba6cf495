from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest
import torch
from huggingface_hub import constants
from transformers import dynamic_module_utils

from kvboost import (
    ConfigError,
    KVBoost,
    ModelError,
    ModelNotFoundError,
    StockModel,
    UnsupportedModelError,
)
from kvboost.checks.doctor import examine
from kvboost.model.loading import load as loading
from kvboost.model.loading.device import pick_device, pick_dtype, slow_dtype
from support.homes import use_home
from support.tiny import byte_tokenizer, save_tiny, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as a hub would give it."""
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def empty_home(monkeypatch, tmp_path) -> None:
    use_home(monkeypatch, tmp_path / "home")


def test_a_folder_loads_and_generates(folder) -> None:
    with KVBoost.from_pretrained(str(folder), dtype="float32", chunk_size=16) as engine:
        assert engine.dtype == torch.float32
        assert engine.context_length == 256
        ids = engine.encode("hello there")
        stock = StockModel.from_pretrained(str(folder), dtype="float32")
        assert engine.generate(ids, 5, ignore_eos=True).token_ids == stock.generate(ids, 5)
        assert engine.verify_correctness(8)


def test_the_default_dtype_gives_verified_answers(folder) -> None:
    with KVBoost.from_pretrained(str(folder)) as engine:
        assert engine.dtype in (torch.bfloat16, torch.float32)
        assert engine.verify_correctness(8)


def test_a_missing_folder_or_file_is_named() -> None:
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


def test_damaged_weights_are_refused_with_the_folder(folder, tmp_path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(os.urandom(4096))
    with pytest.raises(ModelNotFoundError, match=f"{tmp_path} holds no model"):
        KVBoost.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["smolm2-135m", "SmolLM2-135M", "someone/smollm2-135m-instruct"])
def test_a_misspelled_name_is_guessed(name) -> None:
    said = f"'{name}' is not a bundled or installed.*Did you mean 'smollm2-135m'"
    with pytest.raises(ModelNotFoundError, match=said):
        KVBoost.from_pretrained(name, local_files_only=True)


def test_installed_models_are_guessed_and_listed(monkeypatch, tmp_path) -> None:
    record = tmp_path / "home" / "models" / "qwen2.5-coder-1.5b" / "kvboost.json"
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"qwen2\.5-coder-1\.5b, smollm2-135m") as error:
        KVBoost.from_pretrained("qwen2.5-code-1.5b", local_files_only=True)
    assert "Did you mean 'qwen2.5-coder-1.5b'" in str(error.value)


@pytest.fixture
def silent_hub(monkeypatch) -> Iterator[list[int]]:
    """A hub that closes every connection without an answer; how many there were."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    connections.append(1)  # before the client can see the end of it
                    connection.close()

        Thread(target=serve, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield connections


def test_a_hub_that_does_not_answer_is_asked_once(silent_hub) -> None:
    with pytest.raises(ModelNotFoundError, match="the hub does not answer") as error:
        KVBoost.from_pretrained("smolm2-135m")
    assert "Did you mean 'smollm2-135m'?" in str(error.value)
    assert len(silent_hub) == 1


def test_a_model_in_the_hubs_cache_loads_while_the_hub_does_not_answer(
    folder, monkeypatch, tmp_path
) -> None:
    commit = "0" * 40
    cached = tmp_path / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    (cached / "snapshots").mkdir()
    (cached / "snapshots" / commit).symlink_to(folder)
    monkeypatch.setattr(loading, "why_unreachable", lambda: "no network in this test")
    with KVBoost.from_pretrained("someone/tiny", cache_dir=tmp_path, dtype="float32") as engine:
        assert engine.model_name == "someone/tiny"
    with pytest.raises(ModelNotFoundError, match="no network in this test"):
        KVBoost.from_pretrained("someone/else", cache_dir=tmp_path)


EVIL = """
import pathlib
pathlib.Path(__file__).with_name("ran").touch()
from transformers import PretrainedConfig, PreTrainedTokenizerFast
class Evil(PretrainedConfig):
    model_type = "evil"
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_code_in_a_model_folder_does_not_run_unless_it_is_trusted(
    folder, monkeypatch, tmp_path, part
) -> None:
    """Not even if something types ``y``."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "evil.py").write_text(EVIL)
    if part == "config":
        changes = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
        changed = tmp_path / "config.json"
    else:
        changes = {
            "tokenizer_class": "EvilTokenizer",
            "auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizer"]},
        }
        changed = tmp_path / "tokenizer_config.json"
    changed.write_text(json.dumps(json.loads(changed.read_text()) | changes))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with suppress(ModelError):
        KVBoost.from_pretrained(str(tmp_path)).close()
    assert list(tmp_path.rglob("ran")) == []


def test_code_in_a_model_folder_is_named_as_the_reason(folder, tmp_path) -> None:
    config = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(EVIL)
    with pytest.raises(ModelError, match=r"Python code of its own.*trust_remote_code=True"):
        KVBoost.from_pretrained(str(tmp_path))


def test_an_unknown_model_kwarg_is_refused_with_its_name(folder) -> None:
    with pytest.raises(ConfigError, match="transformers refuses one of the options sink_size"):
        KVBoost.from_pretrained(str(folder), model_kwargs={"sink_size": 4})


def test_torch_dtype_means_dtype(folder) -> None:
    with pytest.warns(UserWarning, match="float16 is slow on CPUs"):
        engine = KVBoost.from_pretrained(str(folder), torch_dtype=torch.float16)
    with engine:
        assert engine.dtype == torch.float16
    with pytest.raises(ConfigError, match="dtype='float32' and torch_dtype='float16' differ"):
        KVBoost.from_pretrained(str(folder), dtype="float32", torch_dtype="float16")


def test_an_architecture_is_refused_before_weights_are_read(tmp_path) -> None:
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="learned absolute"):
        KVBoost.from_pretrained(str(tmp_path))


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_model_name_that_is_not_a_name_is_refused(name) -> None:
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


@pytest.mark.parametrize("is_loaded", [False, True], ids=["from_pretrained", "from_model"])
def test_a_slow_dtype_is_noted_with_what_to_do(folder, is_loaded: bool) -> None:
    with pytest.warns(UserWarning, match=r"float16 is slow on CPUs; .*dtype=\"float32\"") as warned:
        if is_loaded:
            engine = KVBoost.from_model(tiny_model("llama").half(), byte_tokenizer())
        else:
            engine = KVBoost.from_pretrained(str(folder), dtype="float16")
    with engine:
        assert engine.notes == [str(warning.message) for warning in warned]
    with KVBoost.from_model(tiny_model("llama"), byte_tokenizer()) as engine:
        assert engine.notes == []


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("has_bf16", [False, True])
def test_bfloat16_is_slow_where_the_processor_has_none(monkeypatch, machine, has_bf16) -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    is_arm = machine == "aarch64"
    monkeypatch.setenv("KVBOOST_NATIVE", "0")  # nothing is compiled for a machine that is not here
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16 and not is_arm)
    monkeypatch.setattr(
        torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has_bf16 or not is_arm
    )
    assert (slow_dtype(bf16, cpu) is None) == has_bf16
    assert slow_dtype(torch.float32, cpu) is None and slow_dtype(bf16, torch.device("cuda")) is None
    advice = examine("smollm2-135m", "cpu", "bfloat16").advice
    assert any("--dtype float32" in one for one in advice) != has_bf16
