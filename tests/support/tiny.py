"""Tiny random models of every architecture, and a tokenizer of bytes."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvboost import EmbeddingModel, KVBoost
from kvboost.config import EngineConfig

DEVICE = os.environ.get("KVBOOST_TEST_DEVICE", "cpu")  # "cuda" runs the same tests on a GPU
EOS = 256
VOCAB = 260
CONTEXT = 256

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
_GQA = {**_SIZES, "num_key_value_heads": 2}
_WINDOW = {"sliding_window": 24}

ROPE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _GQA),
    "qwen2": ("Qwen2", _GQA),
    "qwen3": ("Qwen3", {**_GQA, "head_dim": 16}),
    "mistral": ("Mistral", {**_GQA, "sliding_window": None}),
    "mistral-window": ("Mistral", {**_GQA, **_WINDOW}),
    "mixtral": ("Mixtral", {**_GQA, "num_local_experts": 4}),
    "gemma": ("Gemma", {**_GQA, "head_dim": 16}),
    "gemma2": ("Gemma2", {**_GQA, **_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16}),
    "gemma3_text": (
        "Gemma3",
        {**_GQA, **_WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    ),
    # The last two layers read earlier KV.
    "gemma3n_text": (
        "Gemma3n",
        {
            **_GQA,
            **_WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, *[0.0] * 3],
        },
    ),
    # Layers that see their own stretch of text, and layers without RoPE but with a temperature.
    "llama4_text": (
        "Llama4",
        {
            **_GQA,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 40,
            "floor_scale": 16,
            "attn_scale": 0.5,
            "interleave_moe_layer_step": 2,
        },
    ),
    # Layers of two shapes, full ones with K = V and partly rotated; the last two read earlier KV.
    "gemma4_text": (
        "Gemma4",
        {
            **_GQA,
            **_WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "phi": ("Phi", _GQA),
    "phi3": ("Phi3", _GQA),
    "phi3-window": ("Phi3", {**_GQA, **_WINDOW}),
    "stablelm": ("StableLm", _GQA),
    "olmo2": ("Olmo2", _GQA),
    "gpt_neox": ("GPTNeoX", _SIZES),
    "smollm3": ("SmolLM3", {**_GQA, "no_rope_layer_interval": 2}),
    "granite": ("Granite", _GQA),
    "gpt_oss": (
        "GptOss",
        {
            **_GQA,
            **_WINDOW,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "cohere": ("Cohere", _GQA),
    "glm": ("Glm", {**_GQA, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "cohere2": (
        "Cohere2",
        {**_GQA, **_WINDOW, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**_GQA, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32},
    ),
}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _SIZES),
    "opt": ("OPT", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": ("Bloom", _SIZES),
    "mpt": ("Mpt", {**_SIZES, "max_seq_len": CONTEXT}),
}
READING_IMAGES = ("idefics3", "smolvlm", "qwen2_5_vl", "qwen3_vl")
"""Those of ``vision_models.py`` alone."""
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
_SQUARE = {"image_size": 28, "patch_size": 14}
_PROJECTED = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
_INTERN = {"image_size": [28, 28], "patch_size": [14, 14]}
_TOWERS: dict[str, tuple[str, str, dict[str, Any], str, dict[str, Any]]] = {
    "internvl": ("InternVL", "InternVL", _INTERN, "qwen2", {"image_token_id": 259}),
    "gemma3": ("Gemma3", "Siglip", _SQUARE, "gemma3_text", {"mm_tokens_per_image": 4}),
    "gemma4": ("Gemma4", "Gemma4", {"num_key_value_heads": 2, "head_dim": 16}, "gemma4_text", {}),
    "kimi_k25": (
        *("Kimi_K25", "Kimi_K25", {"pos_emb_height": 4, "pos_emb_width": 4}),
        *("deepseek_v3", {"projection_hidden_size": 32}),
    ),
    "llama4": ("Llama4", "Llama4", {**_PROJECTED, **_SQUARE}, "llama4_text", {}),
    "mistral3": ("Mistral3", "Pixtral", {**_SQUARE, "head_dim": 16}, "mistral", {}),
    "mistral3-ministral3": ("Mistral3", "Pixtral", {**_SQUARE, "head_dim": 16}, "ministral3", {}),
}
"""Of models that see: the kind, the kind and sizes of the tower, the text part, other options."""
SEEING = (*_TOWERS, *READING_IMAGES)
TEXT_PARTS = {"gemma3n": "gemma3n_text"}
"""Of models whose towers need packages that are not here, the text part."""
TEXT_CONFIGS = ("Gemma3", "Gemma3n", "Gemma4", "Llama4")
ALL_MODELS = ROPE_MODELS | OTHER_MODELS
KINDS = (
    *("llama", "phi3-window", "gemma3_text", "gemma3n_text", "gemma4_text", "llama4_text"),
    *("gpt_oss", "smollm3", "glm", "cohere2", "internvl"),
)
"""One model of each kind of attention and rotation, for what is the same in every family."""


def tiny_config(name: str, **changes: Any) -> Any:
    family, options = ALL_MODELS[name]
    suffix = "TextConfig" if family in TEXT_CONFIGS else "Config"
    return getattr(transformers, f"{family}{suffix}")(**{**options, **changes})


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of a few thousand weights; the same one every time."""
    family, _ = ALL_MODELS[name]
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{suffix}")(tiny_config(name, **changes)).eval()
    with torch.no_grad():  # louder weights, so that attention is far from uniform
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.mul_(4)
            elif name.endswith("sinks"):
                weight.mul_(100)
    return model.to(DEVICE)


def with_tower(kind: str, tower: Any, text: Any, **options: Any) -> PreTrainedModel:
    """A random model of this kind from the configs of its vision tower and its text part."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")
    model = getattr(transformers, f"{kind}ForConditionalGeneration")
    return model(config(text_config=text, vision_config=tower, **options))


def seeing_model(name: str) -> PreTrainedModel:
    """A text model beside a vision tower."""
    if name in READING_IMAGES:
        from support.vision_models import make_vision_model  # which imports this module

        return make_vision_model(name)
    kind, tower, sizes, text, options = _TOWERS[name]
    if text in ALL_MODELS:
        text_config = tiny_config(text)
    else:
        from support.families import FAMILIES, config_of

        text_config = config_of(text, FAMILIES[text])
    vision = getattr(transformers, f"{tower}VisionConfig")(**_TOWER, **sizes)
    return with_tower(kind, vision, text_config, **options).eval().to(DEVICE)


def any_model(name: str, **changes: Any) -> PreTrainedModel:
    """The tiny model of an architecture."""
    return seeing_model(name) if name in SEEING else tiny_model(name, **changes)


@functools.cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and a minimal chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
    vocab["<eos>"] = EOS
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    return fast


def save_tiny(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Saves a tiny model and its tokenizer in ``folder``."""
    any_model(name, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_gemma3n(folder: Path) -> Path:
    """Saves the text part of a Gemma 3n as the whole model has it, and a tensor of its tower."""
    model = tiny_model("gemma3n_text")
    tensors = {
        name.replace("model.", "model.language_model.", 1): weight.contiguous().cpu()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.zeros(2)
    config = transformers.Gemma3nConfig(text_config=model.config.to_dict())
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    byte_tokenizer().save_pretrained(folder)
    return folder


def tiny_encoder() -> EmbeddingModel:
    """A random model for embeddings."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    return EmbeddingModel("tiny-bert", transformers.BertModel(config), byte_tokenizer())


def make_engine(model: PreTrainedModel, *, strict: bool = True, **config: Any) -> KVBoost:
    """An engine without drafts: how many there are depends on how long forwards take."""
    options = {"chunk_size": 16, "speculate": "off", **config}
    return KVBoost.from_model(
        model, byte_tokenizer(), strict=strict, config=EngineConfig(**options)
    )


def chunk_bytes(model: PreTrainedModel, chunk_size: int = 16) -> int:
    """The bytes of a chunk of an engine over a model in one precision."""
    with make_engine(model, max_cache_bytes=0) as engine:
        return chunk_size * engine.model.forward.shape.row_bytes


def in_slices(engine: KVBoost, rows: int) -> KVBoost:
    """The engine, which from now on reads long prompts so many rows at a time."""
    engine.runtime.backend.prefill_slice = rows
    return engine


def runner_of(engine: KVBoost) -> Any:
    """What runs its segments. Over pages it is made with the first request, or now."""
    with engine.runtime.pool.lend(1):
        return engine.runtime.backend.forward


def random_ids(length: int, seed: int) -> list[int]:
    """Ids of bytes, without 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def dynamic_model() -> PreTrainedModel:
    """Dynamic NTK: beyond the 64 tokens of its config, frequencies depend on the length."""
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    return tiny_model("llama", rope_parameters=rope, max_position_embeddings=64)


def longrope_model() -> PreTrainedModel:
    """LongRoPE: beyond 64 tokens every position rotates by other factors."""
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    return tiny_model("phi3", rope_parameters=rope, original_max_position_embeddings=64)
