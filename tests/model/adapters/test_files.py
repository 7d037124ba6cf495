"""Reading the files of adapters. What would not be computed as PEFT does is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost.errors import AdapterError, AdapterNotFoundError
from kvboost.model.adapters.files import read_adapter
from support.adapters import QV, write_adapter
from support.tiny import tiny_model

MODEL = tiny_model("llama")


def test_scales_follow_the_config(tmp_path: Path) -> None:
    folder = write_adapter(
        tmp_path,
        MODEL,
        targets=QV,
        rank=4,
        lora_alpha=16,
        rank_pattern={"v_proj": 9},
        alpha_pattern={"layers.1.self_attn.q_proj": 2},
    )
    modules = read_adapter(folder).modules
    assert modules["model.layers.0.self_attn.q_proj"].scale == 4.0
    assert modules["model.layers.1.self_attn.q_proj"].scale == 0.5
    assert modules["model.layers.0.self_attn.v_proj"].scale == pytest.approx(16 / 9)
    assert len(modules["model.layers.0.self_attn.v_proj"].down) == 9
    changed = write_adapter(tmp_path, MODEL, targets=QV, rank=4, lora_alpha=16, use_rslora=True)
    assert read_adapter(changed).modules["model.layers.0.self_attn.q_proj"].scale == 8.0


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    digest = read_adapter(write_adapter(tmp_path / "a", MODEL, targets=QV)).hashed.result()
    same = write_adapter(tmp_path / "b", MODEL, targets=QV, base_model_name_or_path="elsewhere")
    assert read_adapter(same).hashed.result() == digest
    for changes in ({"seed": 1}, {"lora_alpha": 3}, {"alora_invocation_tokens": [1]}):
        given: Any = {"targets": QV, **changes}
        other = read_adapter(write_adapter(tmp_path / "c", MODEL, **given))
        assert other.hashed.result() != digest


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "only 'LORA'"),
        ({"use_dora": True}, "DoRA changes the norms"),
        ({"bias": "all"}, "it has biases"),
        ({"lora_bias": True}, "it has biases"),
        ({"modules_to_save": ["lm_head"]}, "replaces whole modules"),
        ({"trainable_token_indices": [1]}, "changes embeddings"),
        ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
        ({"made_up": {"x": 1}}, "made_up=.* does not know"),
        ({"r": 5}, "says rank 5"),
        ({"lora_alpha": "many"}, "lora_alpha='many'"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(AdapterError, match=said):
        read_adapter(write_adapter(tmp_path, MODEL, targets=QV, **config))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embeddings"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.bias", "biases"),
        ("base_model.model.model.norm.weight", "would stay unused"),
        ("base_model.model.model.layers.0.mlp.up_proj.lora_A.weight", "lora_A only"),
    ],
)
def test_no_tensor_stays_unused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(AdapterError, match=said):
        read_adapter(write_adapter(tmp_path, MODEL, targets=QV, tensors={name: torch.ones(4, 4)}))


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", "~nobody-of-this-name/x", "a\0b"):
        with pytest.raises(AdapterNotFoundError, match="there is no adapter in"):
            read_adapter(path)
