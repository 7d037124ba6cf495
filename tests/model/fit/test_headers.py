"""Sizes come from the headers of files alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants

from kvboost.errors import ModelError, ModelNotFoundError
from kvboost.model.execution.caches import observe
from kvboost.model.fit.headers import _type_of_gguf, read_header
from kvboost.model.loading.load import read
from support.mxfp4 import save_mxfp4
from support.tiny import tiny_model


def write_folder(
    folder: Path, tensors: dict[str, tuple[str, list[int], int]], **config: Any
) -> None:
    """A transformers folder whose safetensors file has a header and no data."""
    folder.mkdir()
    end, described = 0, {"__metadata__": {"format": "pt"}}
    for name, (kind, shape, size) in tensors.items():
        described[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(described).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (folder / "config.json").write_text(json.dumps(config))


def test_a_gguf_file_says_what_it_holds(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "some.gguf", "llama")
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_embedding_length(64)
    writer.add_context_length(512)
    codes = quants.quantize(np.ones((32, 64), np.float32), GGMLQuantizationType.Q4_0)
    for layer in range(2):
        writer.add_tensor(f"blk.{layer}.attn_q.weight", codes, raw_dtype=GGMLQuantizationType.Q4_0)
    writer.add_tensor("token_embd.weight", np.ones((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_header(tmp_path / "some.gguf")
    assert (found.architecture, found.layers, found.context) == ("llama", 2, 512)
    assert found.kv_numbers == 2 * 2 * 2 * 16
    assert found.parameters == 2 * 32 * 64 + 8 * 64
    assert found.stored_bytes == 2 * 32 * 64 * 18 // 32 + 8 * 64 * 4
    assert found.kind == "Q4_0" and found.is_quantized and found.embedding is None
    assert len(found.in_layers) == 2


def test_a_saved_model_has_the_parameters_of_the_model(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "plain")
    found = read_header(tmp_path / "plain")
    assert found.parameters == model.num_parameters()
    assert found.stored_bytes == sum(weight.nbytes for weight in model.parameters())
    assert found.kv_numbers == 2 * 3 * 2 * 16 and not found.is_quantized
    assert found.embedding is not None, "the head is another tensor"
    assert found.features is not None and found.unsupported is None
    assert (found.features.exact, found.features.moved) == ("yes", "yes")


def test_a_model_with_latents_needs_memory_for_them_only(tmp_path: Path) -> None:
    latents = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_attention_heads": 128}
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, **latents}
    write_folder(tmp_path / "model", {}, **config)
    assert read_header(tmp_path / "model").kv_numbers == 61 * (512 + 64)
    kimi = {"model_type": "kimi_k25", "text_config": {**config, "model_type": "kimi_k2"}}
    write_folder(tmp_path / "kimi", {}, **kimi)
    assert read_header(tmp_path / "kimi").kv_numbers == 61 * (512 + 64)


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_layers_that_differ_count_as_what_they_store(tmp_path: Path, name: str) -> None:
    model = tiny_model(name)
    stored = observe(model).shape.row_bytes // torch.float32.itemsize
    model.save_pretrained(tmp_path)
    assert read_header(tmp_path).kv_numbers == stored
    config = json.loads((tmp_path / "config.json").read_text())
    if config.pop("per_layer_config", None):  # as Google writes it
        config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_header(tmp_path).kv_numbers == stored


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("kimi_linear", "it keeps a state of linear layers"),
        ("brand_new", "it is not among the architectures that were tested"),
    ],
)
def test_a_model_that_is_not_supported_says_why(tmp_path: Path, model_type: str, said: str) -> None:
    write_folder(tmp_path / "model", {}, model_type=model_type)
    found = read_header(tmp_path / "model")
    assert str(found.unsupported).startswith(said) and found.features is None


@pytest.mark.parametrize(
    ("written", "model_type"),
    [("qwen3moe", "qwen3_moe"), ("gemma3", "gemma3_text"), ("gpt-oss", "gpt_oss"), ("llama",) * 2],
)
def test_names_of_gguf_files_are_those_of_transformers(written: str, model_type: str) -> None:
    assert _type_of_gguf(written) == model_type


def test_codes_of_a_quantised_folder_count_as_the_weights_they_are(tmp_path: Path) -> None:
    write_folder(
        tmp_path / "awq",
        {
            "model.layers.0.mlp.up_proj.qweight": ("I32", [64, 16], 64 * 16 * 4),
            "model.layers.0.mlp.up_proj.scales": ("F16", [1, 128], 256),
        },
        model_type="llama",
        num_hidden_layers=1,
        num_attention_heads=4,
        hidden_size=64,
        quantization_config={"quant_method": "awq", "bits": 4},
    )
    found = read_header(tmp_path / "awq")
    assert found.parameters == 64 * 128 + 128 and found.is_quantized
    assert found.bits == pytest.approx(4.2, abs=0.1)


def test_a_quantised_folder_with_experts_does_not_stay_packed(tmp_path: Path) -> None:
    weight = {"model.layers.0.self_attn.q_proj.qweight": ("I32", [64, 16], 64 * 16 * 4)}
    config = {"num_hidden_layers": 1, "quantization_config": {"quant_method": "awq", "bits": 4}}
    for model_type, packs in (("qwen3", True), ("qwen3_moe", False)):
        write_folder(tmp_path / model_type, weight, model_type=model_type, **config)
        assert read_header(tmp_path / model_type).is_quantized is packs


def test_mxfp4_experts_count_as_the_weights_they_are(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts.down_proj"
    write_folder(
        tmp_path / "gpt-oss",
        {
            f"{experts}_blocks": ("U8", [4, 64, 3, 16], 4 * 64 * 48),
            f"{experts}_scales": ("U8", [4, 64, 3], 4 * 64 * 3),
            "model.norm.weight": ("BF16", [64], 128),
        },
        model_type="gpt_oss",
        quantization_config={"quant_method": "mxfp4"},
    )
    found = read_header(tmp_path / "gpt-oss")
    assert found.parameters == 4 * 64 * (96 + 3) + 64
    assert found.is_quantized and not found.packs_on_cpu


def test_mxfp4_experts_take_what_a_packed_model_takes(tmp_path: Path) -> None:
    """Their blocks are filled up to groups of four."""
    save_mxfp4(tmp_path, num_hidden_layers=1)
    header = read_header(tmp_path)
    said = {tensor.name: tensor.packed_bytes for tensor in header.tensors}
    model = read(tmp_path, strict=True, device="cpu", dtype="float32", weight_form="packed")[0]
    weight = model.model.layers[0].mlp.experts.packed("down_proj")
    name = "model.layers.0.mlp.experts.down_proj"
    assert said[f"{name}_blocks"] == weight.codes.nbytes
    assert said[f"{name}_scales"] == weight.scales.nbytes
    assert weight.nbytes > sum(t.num_bytes for t in header.tensors if t.name.startswith(f"{name}_"))


def test_what_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no GGUF file .*none\.gguf"):
        read_header(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match=r"no \.safetensors files"):
        read_header(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"model\.safetensors is no safetensors file"):
        read_header(tmp_path)
    with pytest.raises(ModelNotFoundError, match="there is no model folder"):
        read_header("./not-here")
    monkeypatch.setattr("kvboost.model.loading.hub.why_unreachable", lambda: "no network")
    with pytest.raises(ModelNotFoundError, match=r"the hub does not answer \(no network\)"):
        read_header("some/model")


def test_a_bundled_model_that_is_not_installed_says_what_it_would_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    found = read_header("smollm2-135m")
    assert found.to_download == found.stored_bytes == 98_362_432
    assert found.kv_numbers is None and 120e6 < found.parameters < 180e6
    assert not list(tmp_path.iterdir())
