"""The tensors of a GGUF file by their names in transformers, straight from the file's bytes."""

from __future__ import annotations

import mmap
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

from kvboost.errors import ModelError
from kvboost.model.loading.gguf import GgufIndex, GgufTensor
from kvboost.model.quantized.blocks import (
    FLOATS,
    Bytes,
    can_read,
    expanded,
    readable_formats,
    weight_from_blocks,
)
from kvboost.model.quantized.checkpoint import CPU, PLAIN, refused
from kvboost.model.quantized.layers import Rows
from kvboost.model.quantized.weight import QuantizedWeight, digest_of_bytes

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3")
"""The names in files of the architectures whose tensors we place. The tests compare each with what
transformers reads."""
NORMS_PLUS_ONE = ("gemma2", "gemma3")
"""Architectures whose files hold the weights of norms with 1 added."""
EXPANDED_AT_ONCE = 1 << 20
"""So many numbers are expanded at a time: on a CPU they stay in its cache, on a GPU what is in
between takes little memory."""


def can_place(index: GgufIndex) -> bool:
    """Whether :class:`GgufCheckpoint` finds the tensors of a file."""
    return index.is_little_endian and index.architecture in ARCHITECTURES


def why_not_packed(index: GgufIndex) -> str | None:
    """Why the weights of a file cannot stay packed; None if they can."""
    if not index.is_little_endian:
        return f"{index.path} is a big-endian file; {PLAIN}"
    if index.architecture not in ARCHITECTURES:
        return (
            f"{index.path} holds a model of the architecture {index.architecture!r}, and only "
            f"those of {', '.join(ARCHITECTURES)} stay packed; {PLAIN}"
        )
    if not any(can_read(tensor.kind) for tensor in index.tensors.values()):
        return f"{index.path} holds no quantised tensors; use weights='plain'"
    for tensor in index.tensors.values():
        if not can_read(tensor.kind) and tensor.kind not in FLOATS:
            known = ", ".join(readable_formats())
            why = f"has the format {tensor.kind.name}, and {known} stay packed"
            return str(refused(index.path, tensor.name, why, PLAIN))
    return None


class GgufCheckpoint:
    """A GGUF file as a :class:`QuantizedCheckpoint`. It keeps the file mapped: embeddings read
    their rows from it."""

    def __init__(self, index: GgufIndex, config: Any) -> None:
        """``config`` is the model's, of transformers. The file must be one that :func:`can_place`
        knows; if weights are to stay packed, ask :func:`why_not_packed` first."""
        self._index = index
        self._config = config.get_text_config()
        kinds = {tensor.kind.name for tensor in index.tensors.values() if can_read(tensor.kind)}
        self.format = f"GGUF {', '.join(sorted(kinds))}"

    @cached_property
    def _names(self) -> Any:
        known: dict[str, MODEL_ARCH] = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}
        arch = known[self._index.architecture]
        return get_tensor_name_map(arch, self._config.num_hidden_layers)

    def _find(self, name: str) -> GgufTensor | None:
        module, _, kind = name.rpartition(".")
        found = self._names.get_name(module)
        return None if found is None else self._index.tensors.get(f"{found}.{kind}")

    def _tensor(self, name: str) -> GgufTensor:
        found = self._find(name)
        if found is None:
            raise ModelError(
                f"{self._index.path} holds no tensor for {name!r}, which the model needs; the file "
                "is for another model or incomplete"
            )
        return found

    def is_quantized(self, name: str) -> bool:
        found = self._find(name)
        return found is not None and can_read(found.kind)

    def quantized(self, name: str) -> QuantizedWeight:
        tensor = self._tensor(name)
        made = weight_from_blocks(self._blocks(tensor), tensor.kind, self._order(tensor))
        self._leave(tensor)
        return made

    def rows(self, name: str) -> Rows:
        tensor = self._tensor(name)
        blocks = self._blocks(tensor)

        def read(ids: torch.Tensor) -> torch.Tensor:
            return weight_from_blocks(blocks[ids.numpy()], tensor.kind).dequantized()

        return read

    def digest(self, name: str) -> str:
        tensor = self._tensor(name)
        found = digest_of_bytes(self._blocks(tensor).reshape(-1))
        self._leave(tensor)
        return f"{tensor.shape} {tensor.kind.name} {found}"

    def mxfp4(self, name: str, device: torch.device = CPU) -> None:
        """No such file that KVBoost reads has experts."""

    def plain(
        self, name: str, device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        tensor = self._tensor(name)
        blocks, order = self._blocks(tensor), self._order(tensor)
        is_more = self._index.architecture in NORMS_PLUS_ONE and name.endswith("norm.weight")
        made = torch.empty(tensor.shape, dtype=dtype or torch.float32, device=device)
        rows = made.view(len(blocks), -1)
        step = max(1, EXPANDED_AT_ONCE // rows.shape[1])
        for start in range(0, len(blocks), step):
            some = slice(start, start + step)
            chosen = blocks[some if order is None else order[some]]
            numbers = expanded(chosen, tensor.kind, device)
            rows[some] = numbers - 1 if is_more else numbers
        self._leave(tensor)
        return made

    def _order(self, tensor: GgufTensor) -> npt.NDArray[np.int64] | None:
        """In files of the Llama architecture, the rows of queries and keys are sorted for rotary
        positions of neighbours; in transformers, for those of halves."""
        if self._index.architecture != "llama":
            return None
        heads = {
            "attn_q": self._config.num_attention_heads,
            "attn_k": self._config.num_key_value_heads,
        }.get(tensor.name.split(".")[-2])
        if heads is None:
            return None
        rows = np.arange(tensor.shape[0]).reshape(heads, -1, 2)
        return rows.swapaxes(1, 2).reshape(-1)

    @cached_property
    def _data(self) -> npt.NDArray[np.uint8]:
        return np.memmap(self._index.path, np.uint8, mode="r")

    def _blocks(self, tensor: GgufTensor) -> Bytes:
        """The bytes of a tensor, row by row."""
        data = self._data[tensor.start : tensor.start + tensor.num_bytes]
        rows = tensor.shape[0] if len(tensor.shape) > 1 or tensor.kind in FLOATS else 1
        return data.reshape(rows, -1)

    def _leave(self, tensor: GgufTensor) -> None:
        """Lets the pages of a tensor that was read go, so that they do not count as our memory."""
        mapped = getattr(self._data, "_mmap", None)
        if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, start, tensor.start + tensor.num_bytes - start)
