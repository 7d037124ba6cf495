"""gpt-oss: attention sinks and a window in every other layer, with heads that our C kernels serve.
The tests of all architectures run over a smaller one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost import KVBoost, StockModel
from kvboost.model.native import is_available
from kvboost.model.native.kernels import Kernels
from support.mxfp4 import numbers_in, save_mxfp4
from support.tiny import make_engine, tiny_model

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
    stored = save_mxfp4(tmp_path, num_hidden_layers=1)
    with pytest.warns(UserWarning, match="MXFP4 weights are expanded to float32"):
        engine = KVBoost.from_pretrained(str(tmp_path), dtype="float32", device="cpu")
    name = "model.layers.0.mlp.experts.down_proj"
    with engine:
        assert len(engine.generate("What is new?", 3, ignore_eos=True).token_ids) == 3
        found = dict(engine.model.forward.model.named_parameters())[name]
    expected = numbers_in(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.transpose(1, 2))
