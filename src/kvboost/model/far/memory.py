"""Memory for far rows: a mapped file, or memory of the host that a GPU copies from."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kvboost.config import format_bytes
from kvboost.errors import CacheFolderError
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.execution.kv_shape import KVShape


class FarMemory:
    """Space for ``num_rows`` rows of KV outside of near memory. ``data`` is ``[2, layers, kv_heads,
    rows, head_dim]``; the rows of one layer are next to each other. It holds zeros at first."""

    def __init__(self, shape: KVShape, num_rows: int, memory: torch.Tensor) -> None:
        """``memory`` are bytes."""
        size = (shape.num_layers, 2, shape.num_kv_heads, num_rows, shape.head_dim)
        self.data = memory.view(shape.dtype).view(size).transpose(0, 1)
        self.num_rows = num_rows
        self.on_close: Callable[[], object] = _nothing

    def close(self) -> None:
        """The memory is freed with the last tensor that reads it."""
        self.on_close()


class FileMemory(FarMemory):
    """A file without a name in ``folder``: it is gone when it is not used any more, also if the
    process is killed."""

    def __init__(self, shape: KVShape, num_rows: int, folder: Path | None) -> None:
        num_bytes = num_rows * shape.row_bytes
        where = Path(folder) if folder is not None else Path(tempfile.gettempdir())
        try:
            where.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=where) as file:
                _allocate(file.fileno(), num_bytes, where)
                mapping = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise CacheFolderError(
                f"{format_bytes(num_bytes)} for far rows cannot be had in {str(where)!r}: {error}; "
                "set far_kv_dir to a folder with more space, or lower max_new_tokens"
            ) from error
        memory = torch.from_numpy(np.frombuffer(mapping, np.uint8))
        super().__init__(shape, num_rows, memory)


class HostMemory(FarMemory):
    """Memory of the host, from which a GPU copies."""

    def __init__(self, shape: KVShape, num_rows: int) -> None:
        self._shape = shape
        memory = host_memory(num_rows * shape.row_bytes)
        super().__init__(shape, num_rows, memory)

    def close(self) -> None:
        self._shape.traits.wait(self._shape.device)
        super().close()


def _nothing() -> None: ...


def _allocate(file: int, num_bytes: int, folder: Path) -> None:
    """Reserves the blocks of a file. Writing to a mapped file on a full disk would end the
    process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
        return
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise OSError(f"{format_bytes(free)} are free")
    os.truncate(file, num_bytes)


def copy_rows(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies ``[2, ..., kv_heads, rows, dim]`` between devices. Each head's rows are next to each
    other, all of them are not: torch would gather those of the host in slow memory first. Does not
    wait for a GPU."""
    if source.device == target.device:
        target.copy_(source)
    elif source.dim() == 2:
        target.copy_(source, non_blocking=True)
    else:
        for one, other in zip(source.unbind(0), target.unbind(0), strict=True):
            copy_rows(one, other)
