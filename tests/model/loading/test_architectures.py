"""Conversations with every kind of attention, and models that are refused: random weights, fp32.

``test_families.py`` compares every family with stock transformers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvboost import GenerationMode, KVBoost, SpanKind, StockModel, UnsupportedModelError
from kvboost.model.loading.load import read_config
from kvboost.reuse.plan import LEAST_TOKENS
from support.families import HERE
from support.tiny import (
    DEVICE,
    KINDS,
    OTHER_MODELS,
    any_model,
    make_engine,
    random_ids,
    save_gemma3n,
    save_tiny,
    tiny_model,
)

MORE_KINDS = sorted({"deepseek_v3", "olmo3", "qwen3_moe"} & set(HERE))
"""Latents, two bases, and experts."""


@pytest.mark.parametrize("name", [*KINDS, *MORE_KINDS, "bloom"])
def test_prefix_cache_equals_baseline_for_any_split_of_a_conversation(name, tiny_engine) -> None:
    engine = tiny_engine(name)

    @settings(
        max_examples=settings().max_examples // 5,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        salt = str(data.draw(st.integers(0, 2**32), label="conversation"))
        prompt: list[int] = []
        known = 0
        for turn in range(3):
            length = data.draw(st.integers(1, 45), label=f"length of turn {turn}")
            prompt = prompt + random_ids(length, seed=length)
            base = engine.generate(prompt, 3, GenerationMode.BASELINE, ignore_eos=True)
            hit = engine.generate(
                prompt, 3, GenerationMode.PREFIX_CACHE, ignore_eos=True, cache_salt=salt
            )
            assert hit.token_ids == base.token_ids
            assert hit.exact_tokens >= (known if known >= LEAST_TOKENS else 0)
            prompt = prompt + hit.token_ids
            known = len(prompt) - 1  # the last token was never fed
        scores = [
            engine.score(prompt, base.token_ids, mode, cache_salt=salt).logits
            for mode in (GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE)
        ]
        assert torch.allclose(*scores, atol=1e-3, rtol=0)
        engine.forget_salt(salt)

    run()


@pytest.mark.parametrize("name", sorted(OTHER_MODELS))
def test_models_without_rope_are_refused_with_the_reason(name) -> None:
    with pytest.raises(UnsupportedModelError, match=r"strict=False gives exact prefix") as error:
        make_engine(tiny_model(name))
    assert isinstance(error.value, ValueError)
    scheme = "ALiBi" if name in ("bloom", "mpt") else "learned absolute"
    assert scheme in str(error.value)


@pytest.mark.parametrize(
    ("name", "loaded"), [("llama4", "llama4_text"), ("mistral3-ministral3", "mistral3")]
)
def test_a_folder_of_a_model_that_sees_reads_text(tmp_path, name, loaded) -> None:
    """Folders say ``llama4``, the model that transformers makes of them says ``llama4_text``."""
    save_tiny(tmp_path, name)
    with KVBoost.from_pretrained(str(tmp_path), dtype="float32", device=DEVICE) as engine:
        assert engine.model.support.model_type == loaded
        expected = StockModel(any_model(name)).logits([5, 6, 7])[-1].argmax()
        assert engine.generate([5, 6, 7], 1, ignore_eos=True).token_ids == [int(expected)]


def test_the_text_part_of_a_gemma_3n_is_loaded(tmp_path) -> None:
    """Without timm, which its vision tower needs."""
    save_gemma3n(tmp_path)
    assert read_config(tmp_path, strict=True).model_type == "gemma3n"
    with KVBoost.from_pretrained(str(tmp_path), dtype="float32", device=DEVICE) as engine:
        assert engine.model.support.model_type == "gemma3n_text"
        ids, answer = random_ids(60, seed=1), random_ids(9, seed=2)
        engine.warm(ids)
        scored = engine.score(ids, answer)
        assert scored.reuse.spans[0].kind is SpanKind.EXACT
        expected = StockModel(tiny_model("gemma3n_text")).logits([*ids, *answer])
        assert torch.allclose(scored.logits, expected[len(ids) - 1 : -1], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("name", "flag"), [("gemma3_text", True), ("gemma4_text", "all")])
def test_a_model_that_looks_ahead_is_refused(name, flag) -> None:
    """EmbeddingGemma, for example."""
    model = tiny_model(name, use_bidirectional_attention=flag)
    with pytest.raises(UnsupportedModelError, match="is an encoder"):
        make_engine(model, strict=False)


def test_an_unknown_architecture_explains_itself_and_runs_when_not_strict() -> None:
    model = tiny_model("llama")
    model.config.model_type = "brand_new"
    with pytest.raises(UnsupportedModelError, match="verify_correctness"):
        make_engine(model)
    assert make_engine(model, strict=False).verify_correctness(max_new_tokens=4)
