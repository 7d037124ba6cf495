"""AWQ, GPTQ and compressed-tensors files, written by their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvboost import ModelError
from kvboost.model.loading.load import load
from kvboost.model.quantized import products
from kvboost.model.quantized.layers import QuantizedLinear
from kvboost.model.quantized.safetensors import SafetensorsCheckpoint
from kvboost.model.quantized.source import find_filled
from support.tiny import byte_tokenizer, tiny_model

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column in each half byte of an integer, from the lowest."""


def packed(codes: torch.Tensor, bits: int, columns: tuple[int, ...] | None = None) -> torch.Tensor:
    """``[rows, m]`` codes to ``[rows, m * bits / 32]`` integers."""
    number = 32 // bits
    groups = codes.long().view(len(codes), -1, number)
    if columns is not None:
        groups = groups[..., list(columns)]
    sums = (groups << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(sums >= 2**31, sums - 2**32, sums).int()


def numbers(n: int, k: int, group: int, bits: int, seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=random)
    zeros = torch.randint(1, 2**bits, (n, k // group), generator=random)
    scales = (torch.rand(n, k // group, generator=random) + 0.5).half() / 64
    wide = zeros.repeat_interleave(group, 1), scales.float().repeat_interleave(group, 1)
    return codes, zeros, scales, (codes - wide[0]) * wide[1]


def opened(
    folder: Path, tensors: dict[str, torch.Tensor], **quantization: Any
) -> SafetensorsCheckpoint:
    contiguous = {f"a.b.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder, SimpleNamespace(quantization_config=quantization))


sizes = {"n": st.sampled_from([8, 24]), "groups": st.integers(1, 3), "seed": st.integers(0, 99)}


@settings(max_examples=12)
@given(**sizes)
def test_awq(tmp_path_factory, n: int, groups: int, seed: int) -> None:
    codes, zeros, scales, expected = numbers(n, 32 * groups, 32, 4, seed)
    tensors = {
        "qweight": packed(codes.t(), 4, AWQ_COLUMNS),
        "qzeros": packed(zeros.t(), 4, AWQ_COLUMNS),
        "scales": scales.t(),
    }
    found = opened(tmp_path_factory.mktemp("awq"), tensors, quant_method="awq", bits=4)
    assert found.is_quantized("a.b.weight") and not found.is_quantized("a.weight")
    weight = found.quantized("a.b.weight")
    assert (weight.bits, weight.group) == (4, 32)
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=12)
@given(**sizes, bits=st.sampled_from([4, 8]), version=st.sampled_from(["gptq", "gptq_v2"]))
def test_gptq(tmp_path_factory, n: int, groups: int, seed: int, bits: int, version: str) -> None:
    codes, zeros, scales, expected = numbers(n, 32 * groups, 32, bits, seed)
    tensors = {
        "qweight": packed(codes, bits).t(),
        "qzeros": packed((zeros - int(version == "gptq")).t(), bits),
        "scales": scales.t(),
        "g_idx": torch.arange(32 * groups, dtype=torch.int32) // 32,
    }
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}
    found = opened(tmp_path_factory.mktemp("gptq"), tensors, **config)
    weight = found.quantized("a.b.weight")
    assert (weight.bits, weight.group) == (bits, 32)
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-6, atol=1e-5)


@settings(max_examples=12)
@given(**sizes, bits=st.sampled_from([4, 8]), symmetric=st.booleans())
def test_compressed_tensors(
    tmp_path_factory, n: int, groups: int, seed: int, bits: int, symmetric: bool
) -> None:
    codes, zeros, scales, expected = numbers(n, 32 * groups, 32, bits, seed)
    tensors = {
        "weight_packed": packed(codes, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    if symmetric:
        middle = 2 ** (bits - 1)
        expected = (codes - middle) * scales.float().repeat_interleave(32, 1)
    else:
        tensors["weight_zero_point"] = packed(zeros.t(), bits).t()
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    found = opened(tmp_path_factory.mktemp("compressed"), tensors, **config)
    weight = found.quantized("a.b.weight")
    assert torch.allclose(weight.dequantized(), expected, rtol=1e-6, atol=1e-5)


def test_a_folder_becomes_a_model(tmp_path, monkeypatch) -> None:
    """A GPTQ folder: linear layers are packed, the embedding and the head stay as they are."""
    monkeypatch.setattr(products, "native_dtype", lambda *_: None)
    model = tiny_model("qwen2").cpu()
    tensors = {}
    for name, weight in list(model.named_parameters()):
        if not name.endswith("_proj.weight"):
            tensors[name] = weight.detach()
            continue
        codes, zeros, scales, values = numbers(*weight.shape, 32, 4, seed=len(tensors))
        module = name.removesuffix(".weight")
        tensors[f"{module}.qweight"] = packed(codes, 4).t().contiguous()
        tensors[f"{module}.qzeros"] = packed((zeros - 1).t(), 4)
        tensors[f"{module}.scales"] = scales.t().contiguous()
        weight.data.copy_(values)
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    model.config.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = load(tmp_path, weight_form="packed", device="cpu", dtype="float32").forward.model
    assert isinstance(loaded.model.layers[0].mlp.up_proj, QuantizedLinear)
    ids = torch.arange(2, 40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        assert torch.allclose(loaded(ids).logits, expected, atol=1e-4 * float(expected.max()))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen3_moe", "num_experts": 4}, "have experts, whose quantised weights"),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 4}}, "have experts"),
        ({"model_type": "gpt_neox"}, "have other names in files"),
    ],
)
def test_folders_that_transformers_rearranges_are_left_to_it(
    tmp_path: Path, config: dict[str, Any], why: str
) -> None:
    quantization = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": quantization})
    )
    place = (tmp_path, None, {}, torch.device("cpu"), torch.float32)
    with pytest.raises(ModelError, match=f"{why}.*weights='plain' leaves them to transformers"):
        find_filled("packed", *place)
    assert find_filled("auto", *place) is None


def test_long_groups_are_cut(tmp_path) -> None:
    """One scale for a row of 1,024 columns becomes four."""
    codes, _, scales, _ = numbers(8, 1024, 1024, 4, 0)
    tensors = {
        "weight_packed": packed(codes, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor(codes.shape),
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    weight = opened(tmp_path, tensors, **config).quantized("a.b.weight")
    assert (weight.group, tuple(weight.scales.shape)) == (256, (8, 4))
    assert torch.allclose(weight.dequantized(), (codes - 8) * scales.float(), atol=1e-6)


def test_columns_in_another_order_are_refused(tmp_path) -> None:
    codes, zeros, scales, _ = numbers(8, 64, 32, 4, 0)
    tensors = {
        "qweight": packed(codes, 4).t(),
        "qzeros": packed(zeros.t(), 4),
        "scales": scales.t(),
        "g_idx": torch.arange(64, dtype=torch.int32).flip(0) // 32,
    }
    found = opened(tmp_path, tensors, quant_method="gptq", bits=4)
    with pytest.raises(ModelError, match=r"'a\.b\.g_idx' gives columns.*desc_act.*without it"):
        found.quantized("a.b.weight")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"quant_method": "gptq", "bits": 3}, "has 3 bits"),
        ({"quant_method": "awq", "bits": 8}, "has 8 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
    ],
)
def test_other_variants_are_refused(tmp_path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelError, match=f"{why}.*weights='plain'"):
        opened(tmp_path, {}, **config)
