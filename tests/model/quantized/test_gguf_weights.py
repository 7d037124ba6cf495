"""Plain models of GGUF files against transformers' own loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvboost import ModelError
from kvboost.model.loading import load as loading
from kvboost.model.loading.gguf import check_gguf
from kvboost.model.loading.load import load, read
from kvboost.model.quantized import gguf_weights
from kvboost.model.quantized.gguf_weights import ARCHITECTURES, can_place
from support import tiny_gguf
from support.homes import use_home
from support.tiny import DEVICE, tiny_model
from support.tiny_gguf import write_gguf

MODELS = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
CHANGES = {"qwen3": {"head_dim": 128}}
"""The size of heads that transformers expects in files of this architecture."""


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    use_home(monkeypatch, tmp_path / "home")


def write(name: str, folder: Path, **changes: object) -> Path:
    file = folder / "model.gguf"
    write_gguf(tiny_model(name, **CHANGES.get(name, {}), **changes).cpu(), file, described=True)
    return file


def theirs(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)


def ours(file: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, _ = read(file, strict=True, device=DEVICE, dtype=dtype, weight_form="plain")
    assert not hasattr(model, "hf_quantizer"), "transformers has read it"
    return model


def assert_same(model: PreTrainedModel, expected: PreTrainedModel) -> None:
    assert type(model) is type(expected)
    found, wanted = model.state_dict(), expected.state_dict()
    assert list(found) == list(wanted)
    found, wanted = found | dict(model.named_buffers()), wanted | dict(expected.named_buffers())
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor.cpu(), wanted[name].cpu()), name
    is_tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert is_tied == expected.config.tie_word_embeddings


def test_every_architecture_is_tried() -> None:
    assert {tiny_gguf.ARCHITECTURE_OF.get(name, name) for name in MODELS} == set(ARCHITECTURES)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in MODELS), ("gemma3_text", torch.bfloat16)],
)
def test_parameters_are_those_that_transformers_loads(tmp_path, monkeypatch, name, dtype) -> None:
    monkeypatch.setattr(gguf_weights, "EXPANDED_AT_ONCE", 1000)  # tensors of several slices
    file = write(name, tmp_path)
    assert_same(ours(file, dtype), theirs(file, dtype))


def test_a_file_without_an_output_head_has_tied_embeddings(tmp_path) -> None:
    file = write("llama", tmp_path, tie_word_embeddings=True)
    assert "output.weight" not in check_gguf(file).tensors
    assert_same(ours(file, torch.float32), theirs(file, torch.float32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "TQ2_0"])
def test_formats_that_never_stay_packed_are_expanded_too(tmp_path, monkeypatch, kind) -> None:
    monkeypatch.setattr(tiny_gguf, "kind_of", lambda name: GGMLQuantizationType[kind])
    file = write("llama", tmp_path, hidden_size=256, intermediate_size=256)
    assert_same(ours(file, torch.float32), theirs(file, torch.float32))


def test_packed_weights_leave_a_shared_embedding_in_ordinary_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        tiny_gguf,
        "kind_of",
        lambda name: GGMLQuantizationType.F16 if "embd" in name else GGMLQuantizationType.Q8_0,
    )
    file = write("llama", tmp_path, tie_word_embeddings=True)
    model = load(file, weight_form="packed", device="cpu", dtype="float32").forward.model
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, theirs(file, torch.float32).lm_head.weight)


def test_transformers_loads_what_is_not_placed_here(tmp_path, monkeypatch) -> None:
    file = write("llama", tmp_path)
    expected = theirs(file, torch.float32)
    model, _ = read(file, strict=True, device="cpu", dtype="float32", low_cpu_mem_usage=True)
    assert hasattr(model, "hf_quantizer")
    assert_same(model, expected)
    monkeypatch.setattr(gguf_weights, "ARCHITECTURES", ("qwen2",))
    assert not can_place(check_gguf(file))
    model, tokenizer = read(file, strict=True, device="cpu", dtype="float32")
    assert hasattr(model, "hf_quantizer")
    assert_same(model, expected)
    assert tokenizer.decode(tokenizer.encode("the thing")) == "the thing"


def test_a_file_in_a_subfolder_is_found(tmp_path) -> None:
    (tmp_path / "inner").mkdir()
    file = write("llama", tmp_path / "inner")
    for form in ("plain", "packed"):
        options = {"gguf_file": file.name, "subfolder": "inner", "weight_form": form}
        model, _ = read(tmp_path, strict=True, device="cpu", dtype="float32", **options)
        assert (
            model.config.num_hidden_layers == theirs(file, torch.float32).config.num_hidden_layers
        )


def test_a_missing_tensor_is_named(tmp_path, monkeypatch) -> None:
    """transformers would fill it with random numbers."""
    file = write("llama", tmp_path)
    index = check_gguf(file)
    del index.tensors["blk.1.ffn_up.weight"]
    monkeypatch.setattr(loading, "check_gguf", lambda path: index)
    with pytest.raises(ModelError, match=r"no tensor for 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        ours(file, torch.float32)
