"""Tiny random models of the families that differ little from those in ``tiny.py``."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from support.tiny import DEVICE, EOS, VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
EXPERTS = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_intermediate_size"), 24),
    "moe_num_shared_experts": 1,
    "shared_expert_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
WINDOW = {"sliding_window": 24}
KINDS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
PLAIN_AND_YARN = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {**YARN, "rope_theta": 10_000.0},
}
NTK_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
SMALL_HEADS = {"head_dim": 8}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_head_dim": 20,
    "head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, **KINDS},
    "apertus": {},
    "arcee": {},
    "aria_text": EXPERTS,
    "axk1": {**EXPERTS, **LATENT},
    "beam": {**EXPERTS, **KINDS, "mlp_layer_types": ["dense", "sparse"]},
    "bitnet": SMALL_HEADS,
    "cohere2_moe": {**EXPERTS, **KINDS},
    "cwm": KINDS,
    "deepseek_v2": {**EXPERTS, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {
        **EXPERTS,
        **LATENT,
        "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "dots1": EXPERTS,
    "ernie4_5": {},
    "ernie4_5_moe": EXPERTS,
    "exaone4": KINDS,
    "exaone_moe": {**EXPERTS, **KINDS},
    "flex_olmo": EXPERTS,
    "flint": {**EXPERTS, **KINDS, "mlp_only_layers": [0]},
    "glm4": {},
    "glm4_moe_lite": {**EXPERTS, **LATENT},
    "granite_swa": KINDS,
    "granitemoe": EXPERTS,
    "granitemoe_swa": {**EXPERTS, **KINDS},
    "granitemoeshared": EXPERTS,
    "helium": SMALL_HEADS,
    "hunyuan_v1_dense": {"rope_parameters": NTK_ALPHA},
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "hy_v3": EXPERTS,
    "hyperclovax": {},
    "jais2": {},
    "kolibri1": {**EXPERTS, **KINDS},
    "longcat_flash": {**EXPERTS, **LATENT, "num_layers": 1, "ffn_hidden_size": 48},
    "mellum": {**EXPERTS, **KINDS},
    "minicpm3": LATENT,
    "minimax_m2": {**EXPERTS, "rotary_dim": 8},
    "ministral": KINDS,
    "ministral3": {"rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
    "mistral4": {
        **EXPERTS,
        **LATENT,
        "head_dim": 20,
        "rope_parameters": {**YARN, "rope_theta": 1e4, "llama_4_scaling_beta": 0.1},
    },
    "modernbert-decoder": {**SMALL_HEADS, **KINDS},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo3": {**KINDS, "rope_parameters": PLAIN_AND_YARN},
    "olmoe": {**EXPERTS, **SMALL_HEADS},
    "persimmon": SMALL_HEADS,
    "phimoe": EXPERTS,
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "seed_oss": {},
    "solar_open": EXPERTS,
    "starcoder2": WINDOW,
    "vaultgemma": KINDS,
    "youtu": LATENT,
}
"""What differs from ``SIZES`` in each family's config."""
CLASSES = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
"""transformers lists Mistral 4, which reads text, among the models that see."""
HAS_LATENTS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 22)
"""Older versions of transformers keep expanded keys and values."""
HERE = sorted(
    name
    for name in set(FAMILIES) & set(CLASSES)
    if HAS_LATENTS or "kv_lora_rank" not in FAMILIES[name]
)
"""Older versions of transformers have fewer families."""


def config_of(model_type: str, options: dict[str, Any]) -> Any:
    kind = getattr(transformers, CLASSES[model_type]).config_class
    return kind(**{**SIZES, **options})


def family_model(model_type: str, options: dict[str, Any] | None = None) -> PreTrainedModel:
    """A random model of a few thousand weights. No norm's weights are ones."""
    kind = getattr(transformers, CLASSES[model_type])
    torch.manual_seed(0)
    model = kind(config_of(model_type, FAMILIES[model_type] if options is None else options)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4) if weight.ndim > 1 else weight.add_(torch.rand_like(weight) / 2)
    return model.to(DEVICE)
