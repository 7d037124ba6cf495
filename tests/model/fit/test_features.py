"""What KVBoost does with families of models. ``tests/scripts/test_list_models.py`` compares it with
tiny models of all of them, and ``tests/model/loading/test_families.py`` does what it says."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost import ModelError
from kvboost.model.fit import features as table
from kvboost.model.fit.features import features_in, why_unsupported
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.quantized.safetensors import RENAMED


@pytest.mark.parametrize(
    ("model_type", "feature", "said"),
    [
        ("llama", "packed", "GGUF, awq, gptq, compressed-tensors"),
        ("gpt2", "exact", "with strict=False: it uses learned absolute position embeddings"),
        ("gpt2", "moved", "no: it uses learned absolute position embeddings"),
        ("bloom", "batch", "no: it keeps its own attention"),
        ("qwen3_next", "exact", "from states: up to the nearest kept states of its layers"),
        ("qwen3_next", "batch", "answers: prompts are read one after another"),
        ("qwen3_next", "packed", "no: its layers keep states"),
        ("qwen3_moe", "packed", "no: it has experts"),
        ("gpt_oss", "packed", "mxfp4: its experts, on NVIDIA GPUs"),
        ("gpt_neox", "packed", "no: its tensors have other names in files than in transformers"),
        ("deepseek_v3", "pages", "yes"),
        ("deepseek_v3", "vllm", "no: MLA is not supported yet"),
        ("llama4_text", "pages", "no: some layers attend to their own stretch of text only"),
        ("gemma3n_text", "pages", "no: the KV of its layers differs"),
        ("gemma3", "images", "yes"),
        ("mistral3", "images", "no: only its text part runs"),
        ("zamba2", "adapters", "no: some of its layers share weights"),
    ],
)
def test_a_family_says_what_it_gets(model_type: str, feature: str, said: str) -> None:
    assert getattr(features_in({"model_type": model_type}), feature) == said


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mistral", "sliding_window": None}, "exact, moved"),
        ({"model_type": "mistral", "sliding_window": 4096}, "exact: vLLM frees rows"),
        ({"model_type": "gemma3_text"}, "exact, moved in one group: with --disable-hybrid"),
    ],
)
def test_inside_vllm_windows_decide(config: dict[str, Any], said: str) -> None:
    assert features_in(config).vllm.startswith(said)


def test_the_table_names_supported_families_only() -> None:
    named = {*table.SOME_WITHOUT_POSITIONS, *table.SHARED_WEIGHTS, *RENAMED}
    assert named <= ARCHITECTURES.keys()


def test_a_config_that_cannot_be_read_is_one_sentence() -> None:
    with pytest.raises(ModelError, match=r"cannot read the model's config\.json: .*layers"):
        features_in({"model_type": "llama", "num_hidden_layers": "many"})


def test_a_family_that_transformers_does_not_have_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CONFIG_MAPPING", {})
    assert "does not have it; install a newer one" in str(why_unsupported("llama"))
