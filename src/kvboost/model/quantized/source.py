"""Whether a model's weights stay packed, and what they are read from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from kvboost.model.gguf import GgufIndex
from kvboost.model.gguf_folder import CONFIG, described_folder
from kvboost.model.quantized.build import build
from kvboost.model.quantized.checkpoint import QuantizedCheckpoint
from kvboost.model.quantized.gguf_weights import GgufCheckpoint, why_not_packed
from kvboost.model.quantized.products import is_fast
from kvboost.model.quantized.safetensors import METHODS, SafetensorsCheckpoint
from kvboost.model.streaming.parking import Parking
from kvboost.model.weights import quiet_transformers

UNUSED_OPTIONS = ("device_map", "max_memory", "offload_folder", "quantization_config", "variant")
"""Options of transformers' loader that packed weights, which it does not load, cannot honour."""


@dataclass(frozen=True)
class PackedModel:
    """A model whose weights stay packed, not read yet."""

    config: PretrainedConfig
    folder: Path
    """Where its config and tokenizer are."""
    checkpoint: QuantizedCheckpoint
    options: Mapping[str, Any]
    device: torch.device
    dtype: torch.dtype

    def model(self, auto_class: Any, *, parked: Parking | None = None) -> PreTrainedModel:
        """``parked``: it stays on the host, in the form that it has on its device."""
        make = partial(
            auto_class.from_config,
            self.config,
            dtype=self.dtype,
            **_trust(self.options),
        )
        with quiet_transformers():
            model = build(make, self.checkpoint, self.device, self.dtype, parked=parked)
        if (self.folder / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(self.folder)
        return model

    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder, **_trust(self.options))


def find_packed(
    form: str,
    folder: Path | None,
    index: GgufIndex | None,
    options: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
) -> PackedModel | None:
    """The model in a GGUF file, or else in a folder, if its weights stay packed; None if they
    become plain. ``folder`` also has the config and the tokenizer of a GGUF file, if it is None
    they are taken from the file. ``form`` is ``"auto"``, ``"plain"`` or ``"packed"``. Raises
    ModelError or ConfigError if weights must stay packed and cannot."""
    if form == "plain" or (form == "auto" and not is_fast(device, dtype)):
        return None
    reason = _why_not(folder, index, options)
    if reason is not None and form == "auto":
        return None
    if reason is not None:
        raise ModelError(reason)
    if folder is None:
        assert index is not None
        folder = described_folder(index)
    folder = folder / (options.get("subfolder") or "")
    config = AutoConfig.from_pretrained(folder, **_trust(options))
    checkpoint = open_checkpoint(index, folder, config)
    vars(config).pop("quantization_config", None)  # else transformers would look for its package
    return PackedModel(config, folder, checkpoint, options, device, dtype)


def _why_not(
    folder: Path | None, index: GgufIndex | None, options: Mapping[str, Any]
) -> str | None:
    """Why the weights of a model cannot stay packed; None if they can."""
    unused = [name for name in UNUSED_OPTIONS if options.get(name) is not None]
    if unused:
        return f"{', '.join(unused)} has no effect on packed weights; use weights='plain'"
    if index is not None:
        return why_not_packed(index)
    place = Path(folder or "", options.get("subfolder") or "", CONFIG)
    if not place.is_file():
        return (
            f"weights='packed' needs the model's files on this machine, and there is no {place}; "
            "download the model and give its folder, or use weights='plain'"
        )
    return _why_not_method(method_in(json.loads(place.read_text())))


def _trust(options: Mapping[str, Any]) -> dict[str, bool]:
    return {"trust_remote_code": bool(options.get("trust_remote_code"))}


def _why_not_method(method: str | None) -> str | None:
    if method in METHODS:
        return None
    if method is None:
        return (
            "weights='packed' needs a quantised model: a GGUF file, or a folder whose config.json "
            f"has a quantization_config of {', '.join(METHODS)}; use weights='plain'"
        )
    return (
        f"the weights are quantised by {method!r}, and those of {', '.join(METHODS)} stay packed; "
        "weights='plain' leaves them to transformers"
    )


def method_in(config: Mapping[str, Any]) -> str | None:
    """How the weights of a model with this config.json are quantised; None if they are not."""
    settings = config.get("quantization_config")
    return None if settings is None else str(settings.get("quant_method"))


def open_checkpoint(
    index: GgufIndex | None, folder: Path, config: PretrainedConfig
) -> QuantizedCheckpoint:
    """The tensors of a model whose weights stay packed."""
    if index is not None:
        return GgufCheckpoint(index, config)
    return SafetensorsCheckpoint(folder, config)
