"""Tiny random models with layers that fold all text into a state, in the structure of each
family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.families import EXPERTS, config_of, family_model
from support.tiny import byte_tokenizer

LAYERS = {"num_hidden_layers": 4}
DELTA = {
    **LAYERS,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
WIDER_VALUES = {**DELTA, "linear_num_value_heads": 4}
"""A gated delta rule: a matrix for each head."""
MAMBA = {
    **LAYERS,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
    "head_dim": 8,
}
CONVOLUTIONS = {**LAYERS, "layer_types": ["conv", "full_attention"] * 2, "head_dim": 8}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2},
    "granitemoehybrid": {
        **MAMBA,
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "jamba": {
        **LAYERS,
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1},
    "nemotron_h": {
        **EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
        "num_hidden_layers": 4,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "olmo_hybrid": DELTA,
    "qwen3_5_text": WIDER_VALUES,
    "qwen3_5_moe_text": {**WIDER_VALUES, **EXPERTS},
    "qwen3_next": {**WIDER_VALUES, **EXPERTS},
    "zamba": {
        **LAYERS,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        **LAYERS,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 16,
    },
    "zaya": {**EXPERTS, "num_experts_per_tok": 1},
}
"""What differs from ``families.SIZES`` in each family's config."""

SEEING_HYBRIDS = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "qwen3_5_text"),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text"),
}
"""Models with a vision tower, of which only the text part is read, and that part's type."""

HERE = sorted(set(HYBRIDS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Older versions of transformers have fewer families."""


def save_seeing(model_type: str, folder: Path) -> None:
    """Writes a model with a vision tower, and a tokenizer of bytes."""
    name, text = SEEING_HYBRIDS[model_type]
    kind = getattr(transformers, name)
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
    config = kind.config_class(
        text_config=config_of(text, HYBRIDS[text]).to_dict(),
        vision_config={**vision, "out_hidden_size": 32},
    )
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def hybrid_model(model_type: str) -> PreTrainedModel:
    """A random model of a few thousand weights. No norm's weights are ones."""
    return family_model(model_type, HYBRIDS[model_type])


def save_for_vllm(model_type: str, folder: Path) -> Path:
    """Writes a model whose heads are as large as vLLM's kernels on CPUs need, and a tokenizer of
    bytes."""
    sizes = {"head_dim": 32, "hidden_size": 128, "max_position_embeddings": 2048}
    if model_type == "granitemoehybrid":
        sizes |= {"mamba_d_head": 32, "mamba_d_state": 64, "num_local_experts": 0}
    family_model(model_type, {**HYBRIDS[model_type], **sizes}).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
