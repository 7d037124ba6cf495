"""gpt-oss: attention sinks and a window in every other layer, with heads that our C kernels serve.
The tests of all architectures run over a smaller one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvboost import KVBoost, StockModel
from kvboost.model.native import is_available
from kvboost.model.native.kernels import Kernels
from support.tiny import make_engine, save_tiny, tiny_model

IDS = torch.randint(0, 256, (150,), generator=torch.Generator().manual_seed(3)).tolist()


def logits(engine: KVBoost, mode: str) -> torch.Tensor:
    return engine.score(IDS[:121], [*IDS[121:], 0], mode).logits


@pytest.mark.skipif(not is_available(torch.float32), reason="no C compiler")
def test_our_kernels_count_the_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss", head_dim=32)
    layers = []
    attend = Kernels.attend
    monkeypatch.setattr(
        Kernels, "attend", lambda *given: (layers.append(given[2]), attend(*given))[1]
    )
    stock = StockModel(tiny_model("gpt_oss", head_dim=32))
    expected, answer = stock.logits(IDS)[-30:], stock.generate(IDS, 8)
    with make_engine(model, chunk_size=32) as engine:
        first = engine.generate(IDS, 8, "prefix_cache", ignore_eos=True)
        second = engine.generate([*IDS, *answer, 7], 2, "prefix_cache", ignore_eos=True)
        assert first.token_ids == answer and second.exact_tokens >= len(IDS)
        for mode in ("baseline", "prefix_cache"):
            assert torch.allclose(logits(engine, mode), expected, atol=1e-3)
        assert set(layers) == {1}  # the others have a window
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(-100.0)
        assert (logits(engine, "baseline") - expected).abs().max() > 0.1


def test_rounding_to_16_bits_does_not_look_like_positions() -> None:
    """The share of a sink depends on a score, which is rounded otherwise at every position. Among
    many experts some are nearly as good as one another, so some layers would choose others."""
    for seed in range(2):
        model = tiny_model("gpt_oss", num_hidden_layers=24, num_local_experts=32)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "router" in name or name.endswith(("bias", "sinks")):
                    weight.copy_(torch.randn_like(weight) / 2)
        with make_engine(model.bfloat16()) as engine:
            assert engine.model.rotation is not None


def test_mxfp4_weights_are_expanded_to_the_models_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss", num_hidden_layers=1)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    experts = "model.layers.0.mlp.experts."
    for name in ("gate_up_proj", "down_proj"):
        number, columns, rows = tensors.pop(experts + name).shape
        codes = torch.randint(0, 256, (number, rows, columns // 32, 16), dtype=torch.uint8)
        tensors[f"{experts}{name}_blocks"] = codes
        tensors[f"{experts}{name}_scales"] = 120 + codes[..., 0] % 5  # powers of 2, from 2**-7 on
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="MXFP4 weights are expanded to float32"):
        engine = KVBoost.from_pretrained(str(tmp_path), dtype="float32", device="cpu")
    with engine:
        assert len(engine.generate("What is new?", 3, ignore_eos=True).token_ids) == 3
        found = dict(engine.model.forward.model.named_parameters())[f"{experts}down_proj"]
    codes, scales = tensors[f"{experts}down_proj_blocks"], tensors[f"{experts}down_proj_scales"]
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([numbers, -numbers])[torch.stack([codes & 15, codes >> 4], -1).long()]
    expected = numbers.flatten(3) * 2.0 ** (scales.float() - 127)[..., None]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.flatten(2).transpose(1, 2))
