"""Where a model is on the host between its checkpoint and its place: in memory as far as that goes,
then in a file. So a model may be larger than the memory of the machine."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import nn

from kvboost.config import format_bytes, home
from kvboost.errors import ModelError
from kvboost.model.loading.machine import available_bytes, memory_bytes
from kvboost.model.streaming.slabs import SlabLayout
from kvboost.model.streaming.tensors import move_tensors

HOST_SHARE = 0.8
"""Of the host's memory, for layers."""


class Parking:
    """Holds the tensors of modules on the host. Several threads may park modules."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` in memory; the rest is in a file, which the system reads where it is
        used."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._in_memory = 0
        self.spilled_bytes = 0
        """In the file."""

    def park(self, module: nn.Module) -> None:
        """Moves a module's tensors from wherever they are."""
        layout = SlabLayout(module)
        with self._lock:
            fits = self._in_memory + layout.num_bytes <= self._most_bytes
            if fits:
                self._in_memory += layout.num_bytes
                slab = None
            else:
                slab = self._mapped(layout.num_bytes)
        if slab is None:
            move_tensors(module, torch.device("cpu"))
            return
        layout.save(slab)
        layout.bind(slab)

    def _mapped(self, num_bytes: int) -> torch.Tensor:
        """More of the file, with space on the disk: writing to it may not fail later."""
        if self._file is None:
            self._file = layers_file(num_bytes)
            weakref.finalize(self, self._file.close)  # what is mapped stays
        start, step = self.spilled_bytes, mmap.ALLOCATIONGRANULARITY
        end = -(-(start + num_bytes) // step) * step
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), start, end - start)
            else:
                self._file.truncate(end)
        except OSError as error:
            raise ModelError(_no_space(num_bytes)) from error
        self.spilled_bytes = end
        mapped = mmap.mmap(self._file.fileno(), num_bytes, offset=start)
        return torch.frombuffer(mapped, dtype=torch.uint8)


def host_bytes(given: int | None, in_memory: int = 0) -> int:
    """The memory of the host for layers: what is ``given``, or most of what is free, with what
    layers that are ``in_memory`` will free."""
    if given is not None:
        return given
    free = available_bytes() + in_memory
    return int(HOST_SHARE * min(free, memory_bytes() or free))


def layers_file(num_bytes: int) -> BinaryIO:
    """A file without a name: it vanishes with the process. There is space for ``num_bytes``."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(folder).free < num_bytes:
        raise ModelError(_no_space(num_bytes))
    return cast(BinaryIO, tempfile.TemporaryFile(dir=folder))


def _folder() -> Path:
    return home() / "layers"


def _no_space(num_bytes: int) -> str:
    free = format_bytes(shutil.disk_usage(_folder()).free)
    return (
        f"layers that fit neither into device_memory nor into host_memory need "
        f"{format_bytes(num_bytes)} on disk, and {_folder()} has {free}; set KVBOOST_HOME to "
        "another folder, or raise host_memory"
    )
