"""What KVBoost does with each family of models: ``kvboost models MODEL`` prints it, and
docs/models.md lists it.

An engine does not ask this table: it measures the model that it loads. The tests compare both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig

from kvboost.errors import ModelError
from kvboost.model.execution.latent import TOO_WIDE, fits_pages
from kvboost.model.loading.compat import ARCHITECTURES, NEW, Architecture
from kvboost.model.loading.experts import num_experts
from kvboost.model.loading.key_scales import FAMILIES as SCALED
from kvboost.model.loading.parallel import UNLIKE
from kvboost.model.loading.unsupported import WHY_NOT
from kvboost.model.quantized.gguf_weights import ARCHITECTURES as IN_GGUF
from kvboost.model.quantized.safetensors import IN_MXFP4, METHODS, MXFP4, RENAMED
from kvboost.model.vision.families import FAMILIES as SEEING

SOME_WITHOUT_POSITIONS = (
    *("afmoe", "beam", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint", "kolibri1"),
    *("llama4", "llama4_text", "smollm3"),
)
"""Families with some layers that do not rotate their keys."""
SHARED_WEIGHTS = ("zamba", "zamba2")
"""Families whose layers share weights."""


@dataclass(frozen=True)
class Features:
    """What a model gets, in words. ``yes``, ``no`` or a part comes first, and a reason or a
    condition after a colon."""

    exact: str
    """Text at the start of a prompt is reused."""
    moved: str
    """Text at other places is reused."""
    images: str
    batch: str
    """Requests share forwards."""
    pages: str
    """On NVIDIA GPUs, KV is in pages and decode steps are CUDA graphs."""
    adapters: str
    packed: str
    """The sources of weights that stay in 4 and 8 bits."""
    vllm: str
    """What KVBoost reuses inside vLLM."""


def why_unsupported(model_type: str) -> str | None:
    """Why models of this type are not supported; None if they are."""
    if model_type not in ARCHITECTURES:
        return f"it {WHY_NOT.get(model_type, NEW)}"
    if model_type not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} does not have it; install a newer one"
    return None


def features_in(config: Mapping[str, Any]) -> Features:
    """The features of a supported model. ``config`` is the content of its config.json; what is not
    in it is as in most models of its type. Raises ModelError if transformers cannot read it."""
    try:
        read = AutoConfig.for_model(**config)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise ModelError(f"transformers cannot read the model's config.json: {error}") from error
    return features(read)


def features(config: Any) -> Features:
    """The features of a supported model with this config of transformers'."""
    name, text = config.model_type, config.get_text_config()
    architecture = ARCHITECTURES[name]
    only_exact = architecture.why_exact_only
    exact = f"with strict=False: it {only_exact}" if only_exact else "yes"
    if architecture.states:
        exact = "from states: up to the nearest kept states of its layers"
    sees = getattr(config, "vision_config", None) is not None
    without_images = "no: only its text part runs" if sees else "no"
    shares = "no: some of its layers share weights"
    return Features(
        exact=exact,
        moved=f"no: it {only_exact}" if only_exact else "yes",
        images="yes" if name in SEEING else without_images,
        batch=_batch(architecture),
        pages=_or_why_not(_why_buffers(architecture, text)),
        adapters=shares if name in SHARED_WEIGHTS else "yes",
        packed=_packed(name, architecture, text),
        vllm=_in_vllm(name, architecture, text, sees=sees),
    )


def _or_why_not(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def _batch(architecture: Architecture) -> str:
    if architecture.states:
        return "answers: prompts are read one after another"
    return "yes" if architecture.packed else "no: it keeps its own attention"


def _why_buffers(architecture: Architecture, text: Any) -> str | None:
    """Why KV is not in pages; None if it is."""
    if not architecture.packed:
        return "it keeps its own attention"
    if architecture.latent and not fits_pages(text.qk_rope_head_dim, text.kv_lora_rank):
        return TOO_WIDE
    if text.model_type in UNLIKE:
        return "the KV of its layers differs"
    if getattr(text, "attention_chunk_size", None):
        return "some layers attend to their own stretch of text only"
    return None


def _packed(name: str, architecture: Architecture, text: Any) -> str:
    if architecture.states:
        return "no: its layers keep states"
    if name in IN_MXFP4:
        return f"{MXFP4}: its experts, on NVIDIA GPUs"
    if num_experts(text):
        return "no: it has experts"
    sources = ["GGUF"] if name.removesuffix("_text") in IN_GGUF else []
    sources += METHODS if name not in RENAMED else ()
    return ", ".join(sources) or "no: its tensors have other names in files than in transformers"


def _in_vllm(name: str, architecture: Architecture, text: Any, *, sees: bool) -> str:
    if architecture.latent:
        return "no: MLA is not supported yet"
    if architecture.states:
        return "from states"
    if architecture.why_exact_only is not None:
        return f"exact: it {architecture.why_exact_only}"
    if sees:
        return "exact: models with images move nothing there"
    if name in SOME_WITHOUT_POSITIONS:
        return "exact: some layers have no positions"
    if name in SCALED:
        return "exact: its keys are scaled after their rotation"
    if text.model_type in UNLIKE:
        return "exact: the KV of its layers differs"
    kinds = set(getattr(text, "layer_types", None) or ())
    if not ("sliding_attention" in kinds if kinds else getattr(text, "sliding_window", None)):
        return "exact, moved"
    if "full_attention" in kinds:
        return "exact, moved in one group: with --disable-hybrid-kv-cache-manager"
    return "exact: vLLM frees rows that leave the windows of its layers"
