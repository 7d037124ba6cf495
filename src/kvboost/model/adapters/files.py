"""The files of an adapter, as PEFT writes them: ``adapter_config.json`` and
``adapter_model.safetensors``.

An adapter that is served in part would give answers of neither the adapter nor the base model, so
every tensor must be used. Names and shapes are read and checked first, the numbers once the adapter
is known to fit the model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from kvboost.config import format_bytes
from kvboost.errors import AdapterNotFoundError
from kvboost.model.adapters.config import CONFIG, LoraConfig
from kvboost.model.adapters.patterns import LONGEST_MODULE
from kvboost.model.adapters.reading import opened, parse, read, refuse, shown
from kvboost.model.loading.machine import available_bytes

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The text that PEFT writes before the path of a module."""
MOST_HEADER_BYTES = 8 << 20
"""For some 40,000 tensors."""
COPIES_IN_MEMORY = 3
"""Of the weights, while they are loaded: the file, its tensors, and those in the model's dtype."""
HASHING_THREADS = 2
"""Hashing takes most of the time that loading takes. hashlib lets other threads run meanwhile."""

_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True)
class ModuleWeights:
    """The two factors for one module, as they are in the file."""

    down: torch.Tensor
    """``[rank, in]``: ``lora_A``."""
    up: torch.Tensor
    """``[out, rank]``: ``lora_B``."""
    scale: float


@dataclass(frozen=True)
class ModuleShape:
    """A module that an adapter changes."""

    down: str
    """The names of its tensors."""
    up: str
    width: int
    """The widths of the module's input and output."""
    height: int
    scale: float


class AdapterFiles:
    """The contents of an adapter's files. ``modules`` and ``hashed`` read its weights when they are
    first asked for; they raise AdapterError if the file is damaged or has changed meanwhile."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        config = LoraConfig(folder)
        self.invocation = config.invocation
        self._header, self._size = _read_header(folder)
        self.shapes: Mapping[str, ModuleShape] = _shapes(folder, config, self._header, self._size)
        """By the path of the module in the model."""

    @cached_property
    def modules(self) -> Mapping[str, ModuleWeights]:
        """The weights, by the path of the module in the model."""
        tensors = self._read_tensors()
        return {
            module: ModuleWeights(tensors[shape.down], tensors[shape.up], shape.scale)
            for module, shape in self.shapes.items()
        }

    @cached_property
    def hashed(self) -> Future[str]:
        """The digest, computed in a thread: weights can be placed meanwhile. It depends on the
        tensors' bytes, their scales and the invocation tokens, and nothing else."""
        hashing = ThreadPoolExecutor(1)
        hashed = hashing.submit(_digest, self.modules, self.invocation)
        hashing.shutdown(wait=False)
        return hashed

    def _read_tensors(self) -> dict[str, torch.Tensor]:
        needed, free = COPIES_IN_MEMORY * self._size, available_bytes()
        if needed > free:
            raise refuse(
                self.path,
                f"loading its {format_bytes(self._size)} needs {format_bytes(needed)} of memory, "
                f"and {format_bytes(free)} are free",
            )
        with opened(self.path, WEIGHTS) as (file, _):
            # In one piece: the digest must be that of the weights that are used.
            data = read(file, self._size + 1)
        if len(data) != self._size or not data.startswith(self._header):
            raise refuse(self.path, f"{WEIGHTS} has changed while it was read")
        try:
            return safetensors.torch.load(data)
        except (SafetensorError, ValueError, LookupError, TypeError, RuntimeError) as error:
            raise refuse(self.path, f"{WEIGHTS} is damaged: {shown(str(error))}") from None


def read_adapter(path: str | os.PathLike[str]) -> AdapterFiles:
    """Reads the adapter in the folder ``path``. Raises AdapterError if there is none, or one that
    is not supported."""
    return AdapterFiles(_folder(path))


def _folder(path: str | os.PathLike[str]) -> Path:
    try:
        folder = Path(path).expanduser()
        if (folder / CONFIG).is_file():
            return folder
    except (OSError, RuntimeError, ValueError):  # of another user; of characters no name may have
        pass
    raise AdapterNotFoundError(
        f"there is no adapter in {shown(repr(os.fspath(path)))}; give a folder with {CONFIG} and "
        f"{WEIGHTS}, as PEFT's save_pretrained writes it"
    )


def _read_header(folder: Path) -> tuple[bytes, int]:
    """The beginning of the weights' file up to its first number, and the size of the file."""
    if not os.path.lexists(folder / WEIGHTS) and (folder / "adapter_model.bin").is_file():
        raise refuse(
            folder,
            "adapter_model.bin is a pickle, which may run code; save the adapter with PEFT as "
            "safetensors",
        )
    with opened(folder, WEIGHTS) as (file, size):
        length = read(file, 8)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > MOST_HEADER_BYTES:
            raise refuse(
                folder,
                f"{WEIGHTS} is damaged: a header of {num_bytes:,} bytes; {MOST_HEADER_BYTES:,} are "
                "allowed",
            )
        header = length + read(file, num_bytes)
        if len(header) < 8 + num_bytes:
            raise refuse(folder, f"{WEIGHTS} is damaged: it ends within its header")
        return header, size


def _shapes(folder: Path, config: LoraConfig, header: bytes, size: int) -> dict[str, ModuleShape]:
    """The modules that an adapter changes, in a file of ``size`` bytes. Each tensor belongs to one
    of them."""
    described = parse(folder, f"the header of {WEIGHTS}", header[8:])
    if not isinstance(described, dict):
        raise refuse(folder, f"{WEIGHTS} is damaged: its header is not an object")
    found: dict[str, dict[str, tuple[str, int, int]]] = {}
    num_bytes = len(header)
    for name, tensor in described.items():
        if name == "__metadata__":
            continue
        match = _TENSOR.fullmatch(name)
        if match is None or len(name) > LONGEST_MODULE or not name.isprintable():
            raise refuse(folder, f"tensor {shown(name)!r} would stay unused: {_what(name)}")
        rows, columns = _matrix(folder, name, tensor)
        num_bytes += rows * columns * _SIZES[tensor["dtype"]]
        module = match["module"].removeprefix(PREFIX)
        found.setdefault(module, {})[match["side"]] = name, rows, columns
    if not found:
        raise refuse(folder, f"{WEIGHTS} holds no tensors")
    if num_bytes != size:
        raise refuse(folder, f"{WEIGHTS} is damaged: {num_bytes:,} bytes in a file of {size:,}")
    return {module: _shape(folder, config, module, found[module]) for module in sorted(found)}


def _matrix(folder: Path, name: str, tensor: Any) -> tuple[int, int]:
    """The rows and columns of a tensor, as the header describes it."""
    try:
        kind, shape, (begin, end) = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
        is_matrix = len(shape) == 2 and all(type(one) is int and one > 0 for one in shape)
        if not is_matrix or kind not in _SIZES:
            raise refuse(
                folder,
                f"tensor {name!r} has shape {shown(shape)} and type {shown(kind)}; only matrices "
                "of floating-point numbers are supported",
            )
        if end - begin != math.prod(shape) * _SIZES[kind]:
            raise refuse(folder, f"{WEIGHTS} is damaged: {name!r} has not the size of its shape")
        return shape[0], shape[1]
    except (TypeError, LookupError):
        raise refuse(folder, f"{WEIGHTS} is damaged: {name!r} is not described") from None


def _what(name: str) -> str:
    if "lora_embedding_" in name:
        return "adapters of embeddings are not supported"
    if "lora_magnitude_vector" in name:
        return "it belongs to DoRA, which is not supported"
    if name.endswith("bias"):
        return "biases are not supported"
    return "only lora_A.weight and lora_B.weight of linear layers are supported"


def _shape(
    folder: Path, config: LoraConfig, module: str, sides: Mapping[str, tuple[str, int, int]]
) -> ModuleShape:
    if len(sides) < 2:
        raise refuse(folder, f"{module} has lora_{'A' if 'A' in sides else 'B'} only; both needed")
    (down, down_rank, width), (up, height, up_rank) = sides["A"], sides["B"]
    rank, scale = config.rank_and_scale(module)
    if not down_rank == up_rank == rank:
        raise refuse(
            folder,
            f"{module} has lora_A {[down_rank, width]} and lora_B {[height, up_rank]}, but "
            f"{CONFIG} says rank {rank:g}",
        )
    if rank > max(width, height):
        raise refuse(folder, f"{module} has rank {rank:g}, more than a layer of its size can use")
    return ModuleShape(down, up, width, height, scale)


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
