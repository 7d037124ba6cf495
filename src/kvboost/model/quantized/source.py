"""Which models KVBoost fills itself, with packed or with plain weights, and from what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvboost.errors import ModelError
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.loading.experts import num_experts
from kvboost.model.loading.gguf import GgufIndex
from kvboost.model.loading.gguf_folder import CONFIG, described_folder
from kvboost.model.loading.weights import quiet_transformers
from kvboost.model.quantized.build import build
from kvboost.model.quantized.checkpoint import QuantizedCheckpoint
from kvboost.model.quantized.experts import DTYPES, has_kernels
from kvboost.model.quantized.gguf_weights import GgufCheckpoint, can_place, why_not_packed
from kvboost.model.quantized.products import is_fast
from kvboost.model.quantized.safetensors import (
    IN_MXFP4,
    METHODS,
    MXFP4,
    RENAMED,
    SafetensorsCheckpoint,
)
from kvboost.model.streaming.parking import Parking

UNUSED_OPTIONS = ("device_map", "max_memory", "offload_folder", "quantization_config", "variant")
"""Options of transformers' loader that packed weights, which it does not load, cannot honour."""
SHARED_OPTIONS = (
    "revision",
    "token",
    "cache_dir",
    "local_files_only",
    "trust_remote_code",
    "subfolder",
    "force_download",
    "proxies",
    "code_revision",
    "gguf_file",
)
"""The options that say where config and tokenizer come from, not only weights."""


@dataclass(frozen=True)
class FilledModel:
    """A model that KVBoost fills with weights, not read yet."""

    config: PretrainedConfig
    folder: Path
    """Where its config and tokenizer are."""
    checkpoint: QuantizedCheckpoint
    options: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype
    packed: bool
    """Whether its weights stay packed."""

    def model(self, auto_class: Any, *, parked: Parking | None = None) -> PreTrainedModel:
        """``parked``: it stays on the host, in the form that it has on its device."""
        make = partial(
            auto_class.from_config, self.config, dtype=self.dtype, **_trust(self.options)
        )
        with quiet_transformers():
            model = build(
                *(make, self.checkpoint, self.device, self.dtype), packed=self.packed, parked=parked
            )
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder, **_trust(self.options))


def find_filled(
    form: str,
    folder: Path | None,
    index: GgufIndex | None,
    options: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> FilledModel | None:
    """The model in a GGUF file, or else in a folder, if KVBoost fills it; None if transformers
    does. ``folder`` also has the config and the tokenizer of a GGUF file, if it is None they are
    taken from the file. ``form`` is ``"auto"``, ``"plain"`` or ``"packed"``. Raises ModelError or
    ConfigError if weights must stay packed and cannot.

    KVBoost fills models whose weights stay packed. It also expands those of GGUF files to plain
    ones, which transformers does tensor by tensor in numpy: with the same result. It leaves to
    transformers the architectures whose tensors it does not place, big-endian files, and loads with
    options that only transformers honours."""
    described = {} if index is not None else _described(folder, options)
    packs = has_kernels if method_in(described) == MXFP4 else is_fast
    packed = form == "packed" or (form == "auto" and packs(device, dtype))
    reason = _why_not(folder, index, described, options, dtype) if packed else None
    if reason is not None and form == "packed":
        raise ModelError(reason)
    packed = packed and reason is None
    if not packed and (index is None or not can_place(index) or set(options) - set(SHARED_OPTIONS)):
        return None
    if folder is not None:
        folder = folder / (options.get("subfolder") or "")
    else:
        assert index is not None
        folder = described_folder(index)
    config = AutoConfig.from_pretrained(folder, **_trust(options))
    checkpoint: QuantizedCheckpoint = (
        SafetensorsCheckpoint(folder, config) if index is None else GgufCheckpoint(index, config)
    )
    vars(config).pop("quantization_config", None)  # else transformers would look for its package
    return FilledModel(config, folder, checkpoint, options, device, dtype, packed)


def _described(folder: Path | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a folder's config.json; empty if there is none."""
    place = Path(folder or "", options.get("subfolder") or "", CONFIG)
    found: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {}
    return found


def _why_not(
    folder: Path | None,
    index: GgufIndex | None,
    config: Mapping[str, Any],
    options: Mapping[str, Any],
    dtype: torch.dtype,
) -> str | None:
    """Why the weights of a model cannot stay packed; None if they can. ``config``: of a folder."""
    unused = [name for name in UNUSED_OPTIONS if options.get(name) is not None]
    if unused:
        return f"{', '.join(unused)} has no effect on packed weights; use weights='plain'"
    if index is not None:
        return why_not_packed(index)
    if not config:
        place = Path(folder or "", options.get("subfolder") or "", CONFIG)
        return (
            f"weights='packed' needs the model's files on this machine, and there is no {place}; "
            "download the model and give its folder, or use weights='plain'"
        )
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is not None and architecture.states:
        return (
            f"layers of model type {config['model_type']!r} keep states, and their weights do not "
            "stay packed; weights='plain' leaves them to transformers"
        )
    method = method_in(config)
    if method == MXFP4:
        return _why_not_mxfp4(config, dtype)
    if method in METHODS:
        return _why_not_folder(config)
    if method is None:
        return (
            "weights='packed' needs a quantised model: a GGUF file, or a folder whose config.json "
            f"has a quantization_config of {', '.join((*METHODS, MXFP4))}; use weights='plain'"
        )
    return (
        f"the weights are quantised by {method!r}, and those of {', '.join((*METHODS, MXFP4))} "
        "stay packed; weights='plain' leaves them to transformers"
    )


def _why_not_mxfp4(config: Mapping[str, Any], dtype: torch.dtype) -> str | None:
    if config.get("model_type") not in IN_MXFP4:
        return (
            f"MXFP4 weights of model type {config.get('model_type')!r} do not stay packed, those "
            f"of {', '.join(IN_MXFP4)} do; weights='plain' leaves them to transformers"
        )
    if dtype not in DTYPES:
        return (
            f"dtype={str(dtype).removeprefix('torch.')!r} does not hold MXFP4 weights; use "
            "'bfloat16' or 'float32', or weights='plain'"
        )
    return None


def _why_not_folder(config: Mapping[str, Any]) -> str | None:
    """Why the weights of a folder with this config.json cannot stay packed, quantised as they are
    by a method that can; None if they can."""
    model_type, remedy = config.get("model_type"), "weights='plain' leaves them to transformers"
    if num_experts(SimpleNamespace(**{**config, **(config.get("text_config") or {})})):
        return (
            f"layers of model type {model_type!r} have experts, whose quantised weights do not "
            f"stay packed; {remedy}"
        )
    if model_type in RENAMED:
        return (
            f"tensors of model type {model_type!r} have other names in files than in transformers, "
            f"and do not stay packed; {remedy}"
        )
    return None


def _trust(options: Mapping[str, Any]) -> dict[str, bool]:
    return {"trust_remote_code": bool(options.get("trust_remote_code"))}


def method_in(config: Mapping[str, Any]) -> str | None:
    """The quantisation of a model with this config.json; None if it has none."""
    settings = config.get("quantization_config")
    return None if settings is None else str(settings.get("quant_method"))
