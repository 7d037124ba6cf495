"""The table of architectures: what each allows, by model type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvboost.errors import UnsupportedModelError
from kvboost.model.loading.unsupported import WHY_NOT
from kvboost.model.vision.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Positions(str, Enum):
    """The way a model encodes the position of a token."""

    ROPE = "rotary position embeddings (RoPE)"
    LEARNED = "learned absolute position embeddings"
    ALIBI = "ALiBi position biases"
    NONE = "no positions, or only those that its states imply"
    UNKNOWN = "an unknown positional scheme"


@dataclass(frozen=True)
class Architecture:
    """``packed``: attention goes through transformers' ``AttentionInterface``, so ours can replace
    it. Otherwise the model keeps its own attention, one sequence at a time. ``latent``: layers keep
    latents in place of keys and values. ``states``: some layers fold all text into a state."""

    positions: Positions
    packed: bool = True
    latent: bool = False
    states: bool = False

    @property
    def why_exact_only(self) -> str | None:
        """Why text is never moved; None if it may be."""
        if self.states:
            return "keeps states of all text before a token, which do not move"
        if self.positions is Positions.ROPE:
            return None
        return f"uses {self.positions.value}"


ROPE = Architecture(Positions.ROPE)
"""``model/loading/rope.py`` measures which layers rotate which channels."""
LATENT = Architecture(Positions.ROPE, latent=True)
STATES = Architecture(Positions.ROPE, packed=False, states=True)
NO_POSITIONS = Architecture(Positions.NONE, packed=False, states=True)

ARCHITECTURES: dict[str, Architecture] = {
    "afmoe": ROPE,
    "apertus": ROPE,
    "arcee": ROPE,
    "aria_text": ROPE,
    "axk1": LATENT,
    "beam": ROPE,
    "bitnet": ROPE,
    "cohere": ROPE,
    "cohere2": ROPE,
    "cohere2_moe": ROPE,
    "cwm": ROPE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": ROPE,
    "ernie4_5": ROPE,
    "ernie4_5_moe": ROPE,
    "exaone4": ROPE,
    "exaone_moe": ROPE,
    "flex_olmo": ROPE,
    "flint": ROPE,
    "gemma": ROPE,
    "gemma2": ROPE,
    "gemma3": ROPE,
    "gemma3_text": ROPE,
    "gemma3n_text": ROPE,
    "gemma4": ROPE,
    "gemma4_text": ROPE,
    "glm": ROPE,
    "glm4": ROPE,
    "glm4_moe": ROPE,
    "glm4_moe_lite": LATENT,
    "gpt_neox": ROPE,
    "gpt_oss": ROPE,
    "granite": ROPE,
    "granite_swa": ROPE,
    "granitemoe": ROPE,
    "granitemoe_swa": ROPE,
    "granitemoeshared": ROPE,
    "helium": ROPE,
    "hunyuan_v1_dense": ROPE,
    "hunyuan_v1_moe": ROPE,
    "hy_v3": ROPE,
    "hyperclovax": ROPE,
    "idefics3": ROPE,
    "internvl": ROPE,  # the InternLM family as transformers ships it
    "jais2": ROPE,
    "kimi_k25": LATENT,  # text only
    "kolibri1": ROPE,
    "llama": ROPE,
    "llama4": ROPE,
    "llama4_text": ROPE,
    "longcat_flash": LATENT,
    "mellum": ROPE,
    "minicpm3": LATENT,
    "minimax_m2": ROPE,
    "ministral": ROPE,
    "ministral3": ROPE,
    "mistral": ROPE,
    "mistral3": ROPE,
    "mistral4": LATENT,
    "mixtral": ROPE,
    "modernbert-decoder": ROPE,
    "nanochat": ROPE,
    "nemotron": ROPE,
    "olmo": ROPE,
    "olmo2": ROPE,
    "olmo3": ROPE,
    "olmoe": ROPE,
    "persimmon": ROPE,
    "phi": ROPE,
    "phi3": ROPE,
    "phimoe": ROPE,
    "qwen2": ROPE,
    "qwen2_5_vl": ROPE,
    "qwen2_moe": ROPE,
    "qwen3": ROPE,
    "qwen3_moe": ROPE,
    "qwen3_vl": ROPE,
    "seed_oss": ROPE,
    "smollm3": ROPE,
    "smolvlm": ROPE,
    "solar_open": ROPE,
    "stablelm": ROPE,
    "starcoder2": ROPE,
    "vaultgemma": ROPE,
    "youtu": LATENT,
    "gpt2": Architecture(Positions.LEARNED),
    "opt": Architecture(Positions.LEARNED),
    "bloom": Architecture(Positions.ALIBI, packed=False),
    "mpt": Architecture(Positions.ALIBI, packed=False),
    "bamba": STATES,
    "falcon_h1": STATES,
    "granitemoehybrid": STATES,
    "jamba": NO_POSITIONS,
    "lfm2": STATES,
    "lfm2_moe": STATES,
    "nemotron_h": NO_POSITIONS,
    "olmo_hybrid": STATES,
    "qwen3_5": STATES,  # text only
    "qwen3_5_moe": STATES,
    "qwen3_5_moe_text": STATES,
    "qwen3_5_text": STATES,
    "qwen3_next": STATES,
    "zamba": NO_POSITIONS,
    "zamba2": STATES,
    "zaya": STATES,
}

UNKNOWN = Architecture(Positions.UNKNOWN, packed=False)
NEW = "is not among the architectures that were tested (docs/models.md)"

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Unless they have an ``alpha``, as Hunyuan's do, which is the same for all lengths."""


@dataclass(frozen=True)
class Support:
    """The features that one loaded model allows."""

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
    """The features that a model with ``config`` allows. ``strict`` refuses what can never be
    moved."""
    model_type = str(config.model_type)
    architecture = ARCHITECTURES.get(model_type, UNKNOWN)
    if strict and architecture is UNKNOWN:
        raise UnsupportedModelError(
            f"model type {model_type!r} {WHY_NOT.get(model_type, NEW)}. With strict=False KVBoost "
            "tries exact prefix reuse through the model's own attention; call "
            "engine.verify_correctness() before you rely on it"
        )
    if strict and architecture.positions is not Positions.ROPE and not architecture.states:
        raise UnsupportedModelError(
            f"model type {model_type!r} uses {architecture.positions.value}: its keys cannot be "
            "re-rotated, so text that moved can never be reused. strict=False gives exact prefix "
            "reuse"
        )
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise UnsupportedModelError(
            f"this model of type {model_type!r} is an encoder: its tokens attend to those after "
            "them, so what was read before depends on what comes next"
        )
    limits = [
        int(rope.get("original_max_position_embeddings") or text.max_position_embeddings)
        for rope in _ropes(text)
        if rope["rope_type"] in LENGTH_DEPENDENT_ROPE and not rope.get("alpha")
    ]
    switches = any(rope["rope_type"] == "longrope" for rope in _ropes(text))
    return Support(model_type, architecture, min(limits, default=None), switches)


def what_is_reused(model_type: str) -> str:
    """Says in words which text of a model type is reused, or why none is."""
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        return f"not supported: it {WHY_NOT.get(model_type, NEW)}"
    if architecture.why_exact_only is None:
        images = ", and so are images" if model_type in FAMILIES else ""
        return f"exact and moved text is reused{images}"
    if architecture.states:
        return (
            f"exact text is reused up to the nearest kept states: it {architecture.why_exact_only}"
        )
    return f"only exact text is reused, with strict=False: it uses {architecture.positions.value}"


def _ropes(config: PretrainedConfig) -> list[dict[str, Any]]:
    """The RoPE parameters of every kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    per_layer_type = all(isinstance(value, dict) for value in parameters.values())
    ropes = parameters.values() if per_layer_type else [parameters]
    return [rope for rope in ropes if "rope_type" in rope]


def context_length(config: PretrainedConfig) -> int | None:
    """The model's context length in tokens; None where its config sets no limit."""
    text = config.get_text_config()
    dynamic = [rope["factor"] for rope in _ropes(text) if rope["rope_type"] == "dynamic"]
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(text, name, None)
        if isinstance(limit, int) and limit > 0:
            return int(limit * max(dynamic, default=1))
    return None
