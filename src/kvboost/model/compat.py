"""What each architecture allows: one table, read by model type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from transformers import PretrainedConfig

from kvboost.errors import UnsupportedModelError


class Positions(str, Enum):
    """How a model encodes the position of a token."""

    ROPE = "rotary position embeddings (RoPE)"
    LEARNED = "learned absolute position embeddings"
    ALIBI = "ALiBi position biases"
    UNKNOWN = "an unknown positional scheme"


@dataclass(frozen=True)
class Architecture:
    """``packed``: attention goes through transformers' ``AttentionInterface``, so ours can replace
    it. Otherwise the model keeps its own attention, one sequence at a time."""

    positions: Positions
    packed: bool = True
    interleaved: bool = False
    """RoPE rotates neighbouring channels, not the two halves of a head."""


ROPE = Architecture(Positions.ROPE)
INTERLEAVED = Architecture(Positions.ROPE, interleaved=True)

ARCHITECTURES: dict[str, Architecture] = {
    "llama": ROPE,
    "qwen2": ROPE,
    "qwen3": ROPE,
    "mistral": ROPE,
    "mixtral": ROPE,
    "gemma": ROPE,
    "gemma2": ROPE,
    "gemma3": ROPE,  # text only, as all models here that see
    "gemma3_text": ROPE,
    "gemma3n_text": ROPE,
    "gemma4": ROPE,
    "gemma4_text": ROPE,
    "llama4_text": INTERLEAVED,
    "phi": ROPE,
    "phi3": ROPE,
    "stablelm": ROPE,
    "internvl": ROPE,  # the InternLM family as transformers ships it
    "olmo2": ROPE,
    "gpt_neox": ROPE,
    "smollm3": ROPE,
    "granite": ROPE,
    "gpt_oss": ROPE,
    "cohere": INTERLEAVED,
    "glm": INTERLEAVED,
    "gpt2": Architecture(Positions.LEARNED),
    "opt": Architecture(Positions.LEARNED),
    "bloom": Architecture(Positions.ALIBI, packed=False),
    "mpt": Architecture(Positions.ALIBI, packed=False),
}

UNKNOWN = Architecture(Positions.UNKNOWN, packed=False)

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True)
class Support:
    """What one loaded model allows."""

    model_type: str
    architecture: Architecture
    reuse_limit: int | None
    """Positions below this one rotate alike in every prompt; beyond it, how a key is rotated
    depends on the prompt's length, and nothing is reused or kept."""
    switches: bool = False
    """LongRoPE: at ``reuse_limit`` all positions change to other factors, once."""

    def switches_at(self, position: int) -> bool:
        return self.switches and position == self.reuse_limit

    @property
    def packed(self) -> bool:
        return self.architecture.packed


def check(config: PretrainedConfig, *, strict: bool) -> Support:
    """What a model with ``config`` allows. ``strict`` refuses what can never be moved."""
    model_type = str(config.model_type)
    architecture = ARCHITECTURES.get(model_type, UNKNOWN)
    if strict and architecture is UNKNOWN:
        raise UnsupportedModelError(
            f"model type {model_type!r} is not among the tested architectures "
            f"({', '.join(sorted(ARCHITECTURES))}). With strict=False it runs with exact prefix "
            "reuse through its own attention; call engine.verify_correctness() before you rely "
            "on it"
        )
    if strict and architecture.positions is not Positions.ROPE:
        raise UnsupportedModelError(
            f"model type {model_type!r} uses {architecture.positions.value}: its keys cannot be "
            "re-rotated, so text that moved can never be reused. strict=False gives exact prefix "
            "reuse"
        )
    text = config.get_text_config()
    limits = [
        int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
        for rope in _ropes(text)
        if rope["rope_type"] in LENGTH_DEPENDENT_ROPE
    ]
    switches = any(rope["rope_type"] == "longrope" for rope in _ropes(text))
    return Support(model_type, architecture, min(limits, default=None), switches)


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of every kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = all(isinstance(value, dict) for value in parameters.values())
    ropes = parameters.values() if per_layer_type else [parameters]
    return [rope for rope in ropes if "rope_type" in rope]


def context_length(config: PretrainedConfig) -> int | None:
    """How many tokens the model can hold, or None where its config sets no limit."""
    text = config.get_text_config()
    dynamic = [rope["factor"] for rope in _ropes(text) if rope["rope_type"] == "dynamic"]
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return int(limit * max(dynamic, default=1))
    return None
