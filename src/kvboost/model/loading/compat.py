"""The table of architectures: what each allows, by model type."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from kvboost.errors import UnsupportedModelError
from kvboost.model.loading.unsupported import WHY_NOT

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

_MODEL_TYPES = {
    ROPE: (
        "afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe cwm dots1 ernie4_5 "
        "ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3 gemma3_text gemma3n "
        "gemma3n_text gemma4 gemma4_text glm glm4 glm4_moe gpt_neox gpt_oss granite granite_swa "
        "granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 "
        "hyperclovax idefics3 internvl jais2 kolibri1 llama llama4 llama4_text mellum minimax_m2 "
        "ministral ministral3 mistral mistral3 mixtral modernbert-decoder nanochat nemotron olmo "
        "olmo2 olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen3 qwen3_moe "
        "qwen3_vl seed_oss smollm3 smolvlm solar_open stablelm starcoder2 vaultgemma"
    ),
    LATENT: (
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k25 longcat_flash minicpm3 mistral4 youtu"
    ),
    Architecture(Positions.LEARNED): "gpt2 opt",
    Architecture(Positions.ALIBI, packed=False): "bloom mpt",
    STATES: (
        "bamba falcon_h1 granitemoehybrid lfm2 lfm2_moe olmo_hybrid qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next zamba2 zaya"
    ),
    NO_POSITIONS: "jamba nemotron_h zamba",
}
"""``internvl`` is how transformers ships the InternLM family. Of Gemma 3n, Kimi K2.5 and
Qwen3.5, only text is supported."""

ARCHITECTURES = {name: kind for kind, names in _MODEL_TYPES.items() for name in names.split()}
"""By model type."""

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
