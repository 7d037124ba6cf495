"""Models with random weights in the shapes of Qwen2.5 and of models with experts or latents: speed
depends on shapes, not on weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvboost.errors import KVBoostError
from kvboost.model.loading.experts import idle_weights
from kvboost.model.quantized.experts import PRODUCTS, num_packed, pack_experts
from kvboost.model.quantized.mxfp4 import GROUP, SCALE_BIAS, WORDS, Mxfp4Weight

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
SHAPES = {  # hidden, intermediate, layers, heads, KV heads
    "tiny": (64, 96, 2, 4, 2),
    "0.5b": (896, 4864, 24, 14, 2),
    "1.5b": (1536, 8960, 28, 12, 2),
    "3b": (2048, 11008, 36, 16, 2),
    "7b": (3584, 18944, 28, 28, 4),
    "32b": (5120, 27648, 64, 40, 8),
}
VOCABULARY = 151_936
EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {  # the family in transformers, its config
    "gpt-oss-20b": (
        "GptOss",
        {
            "vocab_size": 201_088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
    ),
    "qwen3-30b-a3b": (
        "Qwen3Moe",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {
            "vocab_size": 102_400,
            "hidden_size": 2048,
            "intermediate_size": 10_944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
}


def _described(shape: str) -> tuple[str, dict[str, Any]]:
    """The family of a shape, and what its config has of its own."""
    if shape in EXPERTS:
        return EXPERTS[shape]
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    return "Qwen2", {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "tie_word_embeddings": shape not in ("7b", "32b"),
    }


def config_of(shape: str, **changes: Any) -> Any:
    """The transformers config of a shape, with some ``changes``. No token ends an answer."""
    import transformers

    family, own = _described(shape)
    options: dict[str, Any] = {
        "max_position_embeddings": 131_072,
        "architectures": [f"{family}ForCausalLM"],
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return getattr(transformers, f"{family}Config")(**{**options, **own, **changes})


def random_model(shape: str, device: str, dtype: torch.dtype, **changes: Any) -> Any:
    """A transformers model, made on the device; ``changes`` of its config."""
    import transformers

    config = config_of(shape, **changes)
    config.dtype = dtype
    (name,) = config.architectures
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return getattr(transformers, name)(config).eval()
    finally:
        torch.set_default_dtype(previous)


def pack_randomly(model: Any) -> Any:
    """Puts random MXFP4 weights in the place of the experts', about as large as transformers'
    random ones."""
    for module in model.modules():
        if any(name not in module._parameters for name in PRODUCTS):
            continue
        packed = {}
        for name in PRODUCTS:
            plain = getattr(module, name)
            experts, depth, width = plain.shape
            shape = (experts, -(-depth // GROUP), width)
            codes = torch.randint(-(2**31), 2**31, (*shape, WORDS), device=plain.device)
            four = int.from_bytes(bytes([SCALE_BIAS - 7] * 4), "little")
            scales = torch.full(shape, four, dtype=torch.int32, device=plain.device)
            packed[name] = Mxfp4Weight(codes.int(), scales, depth)
        pack_experts(module, packed)
    return model


def device_for(benchmark: str, shapes: Sequence[str]) -> str:
    """cuda, or cpu for the tiny shape where there is no GPU; no other shape runs there."""
    if torch.cuda.is_available():
        return "cuda"
    if list(shapes) != ["tiny"]:
        raise KVBoostError(
            f"{benchmark} needs an NVIDIA GPU, and torch finds none (see --shape tiny)"
        )
    return "cpu"


def number_tokenizer(size: int = VOCABULARY) -> Any:
    """One token per byte, and numbers for the other tokens: random weights choose any of them, and
    all have a text, as those of a real model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"word{number}" for number in range(len(alphabet), size)]
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def step_bytes(model: Any) -> int:
    """The bytes of weights that a decode step of one request reads: of experts, those that a token
    chooses, and all others but an embedding of its own, of which it reads a row."""
    every: int = sum(weight.nbytes for weight in model.parameters())
    every += num_packed(model, in_bytes=True)
    every -= idle_weights(model, in_bytes=True)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    return every if tied else every - int(embedding.nbytes)
