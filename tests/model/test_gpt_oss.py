"""gpt-oss: attention sinks and a window in every other layer, with heads that our C kernels serve.
The tests of all architectures run over a smaller one."""

from __future__ import annotations

import pytest
import torch

from kvboost import KVBoost, StockModel
from kvboost.model.native import is_available
from kvboost.model.native.kernels import Kernels
from tiny import make_engine, tiny_model

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
