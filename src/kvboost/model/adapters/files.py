"""The files of an adapter, as PEFT writes them: ``adapter_config.json`` and
``adapter_model.safetensors``.

What KVBoost would not compute as PEFT does is refused. An adapter that is served in part would give
answers of neither the adapter nor the base model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvboost.errors import AdapterError, AdapterNotFoundError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""What PEFT writes before the path of a module."""

READ = frozenset(
    {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "alora_invocation_tokens"}
)
WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
        *("inference_mode", "lora_dropout", "fan_in_fan_out", "runtime_config", "megatron_core"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("peft_type", "bias", "init_lora_weights", "ensure_weight_tying"),
    }
)
"""Fields about training or about the files, whose tensors say which modules they change; and those
that are checked by themselves."""
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights of the base model as they are."""
REASONS = {
    "use_dora": "DoRA changes the norms of the base model's weights as well",
    "modules_to_save": "it replaces whole modules of the base model",
    "trainable_token_indices": "it changes embeddings",
    "lora_bias": "it has biases",
    "layer_replication": "it changes the number of layers",
    "target_parameters": "it changes parameters that are not linear layers",
}

HASHING_THREADS = 2
"""Hashing takes most of the time that loading takes. hashlib lets other threads run meanwhile."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True)
class ModuleWeights:
    """The two factors for one module, as they are in the file."""

    down: torch.Tensor
    """``[rank, in]``: ``lora_A``."""
    up: torch.Tensor
    """``[out, rank]``: ``lora_B``."""
    scale: float


@dataclass(frozen=True)
class AdapterFiles:
    """What the files of an adapter say."""

    path: Path
    modules: Mapping[str, ModuleWeights]
    """By the path of the module in the model."""
    invocation: tuple[int, ...]
    hashed: Future[str]

    @property
    def digest(self) -> str:
        """Depends on the tensors' bytes, their scales and the invocation tokens, and nothing
        else."""
        return self.hashed.result()


def read_adapter(path: str | os.PathLike[str]) -> AdapterFiles:
    """Reads the adapter in the folder ``path``. Raises AdapterError if there is none, or one that
    is not supported."""
    folder = _folder(path)
    config = _read_config(folder)
    tensors = _read_tensors(folder)
    modules = _modules(folder, config, tensors)
    invocation = _invocation(folder, config)
    hashing = ThreadPoolExecutor(1)  # weights can be placed meanwhile
    hashed = hashing.submit(_digest, modules, invocation)
    hashing.shutdown(wait=False)
    return AdapterFiles(folder, modules, invocation, hashed)


def refuse(path: Path, reason: str) -> AdapterError:
    return AdapterError(f"the adapter in {path} cannot be served: {reason}")


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(path).expanduser()
        if (folder / CONFIG).is_file():
            return folder
    except (OSError, RuntimeError, ValueError):  # of another user; of characters no name may have
        pass
    raise AdapterNotFoundError(
        f"there is no adapter in {os.fspath(path)!r}; give a folder with {CONFIG} and {WEIGHTS}, "
        "as PEFT's save_pretrained writes it"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except OSError as error:
        raise refuse(folder, f"{CONFIG} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise refuse(folder, f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise refuse(folder, f"peft_type={kind!r} in {CONFIG}; only 'LORA' is supported")
    _check_fields(folder, config)
    return config


def _check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("bias", "none") != "none":
        raise refuse(folder, f"bias={config['bias']!r}: it has biases; train with bias='none'")
    start = config.get("init_lora_weights")
    if not any(start is plain for plain in PLAIN_STARTS) and start not in PLAIN_STARTS:
        raise refuse(
            folder,
            f"init_lora_weights={start!r} changes the weights of the base model; save it with "
            "path_initial_model_for_weight_conversion, which gives an ordinary adapter",
        )
    for name, value in config.items():
        if name not in READ and name not in WITHOUT_EFFECT and value:
            why = REASONS.get(name, "KVBoost does not know what this option changes")
            raise refuse(folder, f"{name}={value!r}: {why}")


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / WEIGHTS
    if not file.is_file() and (folder / "adapter_model.bin").is_file():
        raise refuse(
            folder,
            "adapter_model.bin is a pickle, which may run code; save the adapter with PEFT as "
            "safetensors",
        )
    try:
        # In one piece: the digest must be that of the weights that are used.
        return safetensors.torch.load(file.read_bytes())
    except OSError as error:
        raise refuse(folder, f"{WEIGHTS} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise refuse(folder, f"{WEIGHTS} is damaged: {error}") from None


def _modules(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> dict[str, ModuleWeights]:
    """The factors of every module. Each tensor belongs to one of them."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise refuse(folder, f"tensor {name!r} would stay unused: {_what(name)}")
        if tensor.ndim != 2 or not tensor.is_floating_point():
            raise refuse(
                folder,
                f"tensor {name!r} has shape {list(tensor.shape)} and type {tensor.dtype}; only "
                "matrices of floating-point numbers are supported",
            )
        module = match["module"].removeprefix(PREFIX)
        found.setdefault(module, {})[match["side"]] = tensor
    if not found:
        raise refuse(folder, f"{WEIGHTS} holds no tensors")
    return {
        module: _weights(folder, config, module, sides) for module, sides in sorted(found.items())
    }


def _what(name: str) -> str:
    if "lora_embedding_" in name:
        return "adapters of embeddings are not supported"
    if "lora_magnitude_vector" in name:
        return "it belongs to DoRA, which is not supported"
    if name.endswith("bias"):
        return "biases are not supported"
    return "only lora_A.weight and lora_B.weight of linear layers are supported"


def _weights(
    folder: Path, config: Mapping[str, Any], module: str, sides: Mapping[str, torch.Tensor]
) -> ModuleWeights:
    if len(sides) < 2:
        raise refuse(folder, f"{module} has lora_{'A' if 'A' in sides else 'B'} only; both needed")
    down, up = sides["A"], sides["B"]
    rank = _number(folder, config, "rank_pattern", "r", module)
    if not down.shape[0] == up.shape[1] == rank:
        raise refuse(
            folder,
            f"{module} has lora_A {list(down.shape)} and lora_B {list(up.shape)}, but {CONFIG} "
            f"says rank {rank:g}",
        )
    alpha = _number(folder, config, "alpha_pattern", "lora_alpha", module)
    return ModuleWeights(down, up, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _number(
    folder: Path, config: Mapping[str, Any], pattern: str, field: str, module: str
) -> float:
    """A number of the config for one module: that of the first pattern that its path ends with, as
    PEFT chooses it."""
    patterns: Mapping[str, Any] = config.get(pattern) or {}
    try:
        matching = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        key = next(matching, None)
    except re.error as error:
        raise refuse(folder, f"{pattern} in {CONFIG} has a pattern that is none: {error}") from None
    value = config.get(field, 8) if key is None else patterns[key]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise refuse(folder, f"{field if key is None else pattern}={value!r} in {CONFIG}; above 0")
    return float(value)


def _invocation(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    tokens = config.get("alora_invocation_tokens") or ()
    if not isinstance(tokens, Iterable) or not all(type(token) is int for token in tokens):
        raise refuse(folder, f"alora_invocation_tokens={tokens!r} must be token ids")
    return tuple(tokens)


def _digest(modules: Mapping[str, ModuleWeights], invocation: tuple[int, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps(invocation).encode())
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        for found in threads.map(_module_digest, modules, modules.values()):
            digest.update(found)
    return digest.hexdigest()


def _module_digest(name: str, weights: ModuleWeights) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    sides = [(str(side.dtype), list(side.shape)) for side in (weights.down, weights.up)]
    digest.update(json.dumps([name, weights.scale, *sides]).encode())
    for side in (weights.down, weights.up):
        data: Any = side.contiguous().view(torch.uint8).numpy()
        digest.update(data)
    return digest.digest()
