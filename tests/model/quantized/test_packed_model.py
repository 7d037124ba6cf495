"""Models that run from the codes of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import nn

from kvboost import ConfigError, KVBoost, ModelError
from kvboost.model import native, triton
from kvboost.model.loading.gguf import check_gguf
from kvboost.model.loading.load import LoadedModel, load
from kvboost.model.quantized import products
from kvboost.model.quantized.gguf_weights import why_not_packed
from kvboost.model.quantized.layers import (
    BlockProduct,
    QuantizedEmbedding,
    QuantizedLinear,
    num_weights,
    weights_of,
)
from kvboost.model.quantized.products import NativeProduct, describe_path, is_fast
from support.adapters import write_adapter
from support.homes import use_home
from support.tiny import DEVICE, tiny_model
from support.tiny_gguf import install_tiny, write_gguf

CPU = torch.device("cpu")
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}
"""Heads of 32 channels, as our kernels take them."""
needs_kernels = pytest.mark.skipif(
    not native.is_available(torch.float32),
    reason=f"float32 kernels: {native.why_not(torch.float32)}",
)


@pytest.fixture
def home(monkeypatch, tmp_path) -> Path:
    use_home(monkeypatch, tmp_path)
    return tmp_path


def open_tiny(form: str, **config: object) -> KVBoost:
    options = {"chunk_size": 16, "speculate": "off", "device": "cpu", "dtype": "float32"}
    return KVBoost.from_pretrained("tiny", weights=form, **{**options, **config})  # type: ignore[arg-type]


def load_tiny(form: str = "packed") -> LoadedModel:
    return load("tiny", weight_form=form, device="cpu", dtype="float32")


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(2, 60)[None]).logits[0]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3"])
def test_every_architecture_equals_the_model_it_was_made_from(home, monkeypatch, name: str) -> None:
    """By torch's products, which round as the model does."""
    monkeypatch.setattr(products, "native_dtype", lambda *_: None)
    model = tiny_model(name).cpu()
    install_tiny(model, home)
    packed = load_tiny().forward.model
    linears = [module for module in packed.modules() if isinstance(module, QuantizedLinear)]
    assert isinstance(packed.get_input_embeddings(), QuantizedEmbedding)
    assert linears and all(isinstance(linear.product, BlockProduct) for linear in linears)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    assert num_weights(packed) == num_weights(model)
    assert num_weights(packed, embeddings=False) == num_weights(model, embeddings=False)
    expected = logits_of(model)
    assert torch.allclose(logits_of(packed), expected, atol=1e-4 * float(expected.abs().max()))


@needs_kernels
def test_our_kernels_run_whole_layers_from_the_codes(home) -> None:
    model = tiny_model("llama", **WIDE).cpu()
    install_tiny(model, home)
    loaded = load_tiny()
    packed = loaded.forward.model
    kinds = {type(m.product) for m in packed.modules() if isinstance(m, QuantizedLinear)}
    assert NativeProduct in kinds  # the head's 260 rows are no multiple of 16, so torch has it
    assert all("forward" in vars(layer) for layer in packed.model.layers)
    expected, given = logits_of(model), logits_of(packed)
    far = (given - expected).norm() / expected.norm()
    assert 0 < float(far) < 0.1  # rows are rounded to 8 bits


@needs_kernels
def test_the_head_and_the_attentions_inputs_keep_more_of_the_rows(home) -> None:
    install_tiny(tiny_model("llama", **WIDE, vocab_size=272).cpu(), home)
    packed = load_tiny().forward.model
    found = {
        name.rpartition(".")[2]: module.product.joint.fine
        for name, module in packed.named_modules()
        if isinstance(module, QuantizedLinear) and isinstance(module.product, NativeProduct)
    }
    fine = {name for name, is_fine in found.items() if is_fine}
    assert fine == {"lm_head", "q_proj", "k_proj", "v_proj"}
    assert set(found) - fine == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert weights_of(packed) == "packed (native, rows of 8 and 15 bits)"


@pytest.fixture
def packed(home) -> Iterator[KVBoost]:
    install_tiny(tiny_model("llama", **WIDE).cpu(), home)
    with open_tiny("packed") as engine:
        yield engine
        assert engine.check_integrity() == []


TEXT = "It was the best of times, it was the worst of times. "


def test_exact_and_moved_reuse_on_packed_weights(packed) -> None:
    """A hit gives the tokens of a full prefill; moved text is found."""
    prompt = TEXT * 2
    expected = packed.generate(prompt + "So", 8, "baseline")
    packed.generate(prompt + "But", 8)
    hit = packed.generate(prompt + "So", 8)
    assert hit.exact_tokens >= 96
    assert hit.token_ids == expected.token_ids
    moved = packed.generate("Begin. " + prompt + "So", 8, reuse_moved="always")
    assert moved.moved_tokens > 0


def test_a_batch_answers_as_requests_alone(packed) -> None:
    prompts = [TEXT + str(number) for number in range(3)]
    alone = [packed.generate(prompt, 8, "baseline").token_ids for prompt in prompts]
    together = packed.generate_batch(prompts, 8, "baseline")
    assert [result.token_ids for result in together] == alone


def test_an_adapter_adds_to_packed_layers(packed, home) -> None:
    model = tiny_model("llama", **WIDE).cpu()
    folder = write_adapter(home / "adapter", model, targets=("q_proj", "down_proj"))
    packed.load_adapter("extra", folder)
    plain = packed.generate(TEXT, 8)
    adapted = packed.generate(TEXT, 8, adapter="extra")
    assert adapted.token_ids != plain.token_ids
    assert adapted.cached_tokens == 0


def test_packed_and_plain_weights_never_share_kv(home) -> None:
    """Nor do two kernels."""
    install_tiny(tiny_model("llama", **WIDE).cpu(), home)
    identities = {load_tiny("plain").fingerprint, load_tiny().fingerprint}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "native_dtype", lambda *_: None)
        identities.add(load_tiny().fingerprint)
    assert len(identities) == (3 if native.is_available(torch.float32) else 2)
    assert load_tiny().fingerprint in identities


def test_names_are_plain_unless_asked_and_files_are_packed_where_it_is_fast(home) -> None:
    folder = install_tiny(tiny_model("llama", **WIDE).cpu(), home)
    with open_tiny("auto") as engine:
        assert engine.facts()["weights"] == "plain"
    assert is_fast(CPU, torch.float32) == native.is_available(torch.float32)
    assert describe_path(CPU, torch.float32).startswith(
        "yes" if is_fast(CPU, torch.float32) else "slow"
    )
    with pytest.raises(ModelError, match=r"needs a quantised model.*weights='plain'"):
        load(folder, weight_form="packed", device="cpu")
    with pytest.raises(ConfigError, match="weights='small' is not available"):
        open_tiny("small")


def test_a_file_that_cannot_stay_packed_says_which_tensor_and_what_to_do(tmp_path) -> None:
    write_gguf(tiny_model("llama").cpu(), tmp_path / "model.gguf")
    index = check_gguf(tmp_path / "model.gguf")
    assert why_not_packed(index) is None
    name, tensor = next(iter(index.tensors.items()))
    odd = {**index.tensors, name: replace(tensor, kind=GGMLQuantizationType.IQ2_XS)}
    reason = why_not_packed(replace(index, tensors=odd))
    assert reason and name in reason and "IQ2_XS" in reason and "weights='plain'" in reason
    reason = why_not_packed(replace(index, architecture="mamba"))
    assert reason and "'mamba'" in reason and "weights='plain'" in reason


@pytest.mark.skipif(not triton.is_available(), reason="triton is not installed")
@pytest.mark.skipif(DEVICE != "cpu", reason="its kernels run without a GPU")
def test_a_packed_model_runs_in_pages(home, monkeypatch) -> None:
    """Layers whose weights are codes are not fused: their own products run."""
    from support.paged_engines import MEMORY, steps_of, use_pages

    monkeypatch.setattr(products, "native_dtype", lambda *_: None)
    install_tiny(tiny_model("llama", num_hidden_layers=1).cpu(), home)
    prompt = list(range(2, 40))
    with open_tiny("packed") as engine:
        expected = engine.generate(prompt, 4, ignore_eos=True).token_ids
    use_pages(monkeypatch)
    with open_tiny("packed", max_kv_bytes=MEMORY) as engine:
        assert engine.generate(prompt, 4, ignore_eos=True).token_ids == expected
        assert steps_of(engine).num_steps > 0
