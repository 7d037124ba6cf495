"""Memory for far rows: a mapped file, or memory of the host that a GPU copies from."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from kvboost.config import format_bytes
from kvboost.errors import CacheFolderError
from kvboost.model.kv import KVShape

log = logging.getLogger("kvboost")


class FarMemory:
    """Space for ``num_rows`` rows of KV outside of near memory. ``data`` is ``[2, layers, kv_heads,
    rows, head_dim]``; the rows of one layer are next to each other. It holds zeros at first."""

    is_pinned = False
    """Whether a GPU copies from it without a detour."""

    def __init__(self, shape: KVShape, num_rows: int, mapping: mmap.mmap) -> None:
        size = (shape.num_layers, 2, shape.num_kv_heads, num_rows, shape.head_dim)
        num_bytes = num_rows * shape.row_bytes
        numbers = torch.from_numpy(np.frombuffer(mapping, np.uint8, num_bytes)).view(shape.dtype)
        self.data = numbers.view(size).transpose(0, 1)
        self.num_rows = num_rows
        self.num_bytes = num_bytes
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
        super().__init__(shape, num_rows, mapping)


class HostMemory(FarMemory):
    """Memory of the host. It is registered with the GPU's driver, which then copies from it at full
    speed and while computing; allocating it pinned would round it up to a power of two."""

    def __init__(self, shape: KVShape, num_rows: int) -> None:
        mapping = mmap.mmap(-1, num_rows * shape.row_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # registering touches every page
            with suppress(OSError):
                mapping.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(shape, num_rows, mapping)
        if shape.device.type == "cuda":
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, self.num_bytes, 0))
            self.is_pinned = code == 0
            if not self.is_pinned:
                log.warning(
                    "%s of far rows could not be pinned (CUDA error %d): copies from them are slow",
                    format_bytes(self.num_bytes),
                    code,
                )

    @property
    def _address(self) -> int:
        return self.data.data_ptr()

    def close(self) -> None:
        if self.is_pinned:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self.is_pinned = False
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
