"""Layers in a file, read ahead by a thread into a few buffers in memory."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import BinaryIO

import torch

from kvboost.errors import ModelError
from kvboost.model.streaming.slots import Copied

READ_BYTES = 16 << 20
"""Read at once."""


class DiskLayers:
    """Slabs in a file. The thread reads them in order, again and again, as far ahead as there are
    buffers. A layer that is asked for out of order makes it start anew there."""

    def __init__(
        self, file: BinaryIO, places: Mapping[int, tuple[int, int]], buffers: Sequence[torch.Tensor]
    ) -> None:
        """``places``: where each layer begins in the file and how many bytes it has, in the order
        in which layers are used. ``buffers``: uint8, each large enough for any layer."""
        self._file = file
        self._places = dict(places)
        self._order = list(places)
        self._lock = threading.Condition()
        self._free: deque[tuple[torch.Tensor, Copied | None]] = deque((b, None) for b in buffers)
        self._read: dict[int, torch.Tensor] = {}
        self._lent: dict[int, torch.Tensor] = {}
        self._next = 0
        self._reading: int | None = None
        self._round = 0
        """Changes when the thread starts anew: what it was reading then is of no use."""
        self._error: Exception | None = None
        self._closed = False
        self.num_read = 0
        self._thread = threading.Thread(target=self._run, name="kvboost-layers", daemon=True)
        self._thread.start()

    def __contains__(self, layer: int) -> bool:
        return layer in self._places

    def is_read(self, layer: int) -> bool:
        """Whether :meth:`take` would not wait."""
        with self._lock:
            return layer in self._read

    def take(self, layer: int) -> torch.Tensor:
        """The bytes of a layer, to be given back. Waits until they are read."""
        with self._lock:
            while layer not in self._read:
                if self._error is not None:
                    raise ModelError(f"streamed layers cannot be read: {self._error}")
                if not self._is_coming(layer):
                    self._start_at(layer)
                self._lock.wait()
            buffer = self._lent[layer] = self._read.pop(layer)
            return buffer[: self._places[layer][1]]

    def give_back(self, layer: int, copied: Copied) -> None:
        """After ``copied``, the bytes of a layer that was taken are needed no longer."""
        with self._lock:
            self._free.append((self._lent.pop(layer), copied))
            self._lock.notify_all()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._thread.join()
        self._file.close()

    def _is_coming(self, layer: int) -> bool:
        return layer == self._reading or (bool(self._free) and layer == self._order[self._next])

    def _start_at(self, layer: int) -> None:
        self._round += 1
        self._reading = None
        self._next = self._order.index(layer)
        self._free.extend((buffer, None) for buffer in self._read.values())
        self._read.clear()
        self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closed or self._free)
                if self._closed:
                    return
                layer = self._reading = self._order[self._next]
                self._next = (self._next + 1) % len(self._order)
                after = self._order[self._next]
                (buffer, copied), this_round = self._free.popleft(), self._round
            error = self._fill(buffer, copied, layer, after)
            with self._lock:
                self._lock.notify_all()
                if error is not None:
                    self._error = error
                    return
                self.num_read += 1
                if this_round == self._round:
                    self._read[layer], self._reading = buffer, None
                else:
                    self._free.append((buffer, None))

    def _fill(
        self, buffer: torch.Tensor, copied: Copied | None, layer: int, after: int
    ) -> Exception | None:
        start, num_bytes = self._places[layer]
        try:
            if copied is not None:
                copied.synchronize()
            _expect(self._file, *self._places[after])
            _read_into(self._file, buffer[:num_bytes], start)
        except (OSError, RuntimeError) as error:  # of the disk, or of the GPU
            return error
        return None


def _expect(file: BinaryIO, start: int, num_bytes: int) -> None:
    """Makes the system read what is needed next."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, num_bytes, os.POSIX_FADV_WILLNEED)


def _read_into(file: BinaryIO, target: torch.Tensor, start: int) -> None:
    """Reads ``target`` from ``start`` on, and makes the system forget what was read: it will be
    needed again only after everything else."""
    view = target.numpy().data
    for at in range(0, len(view), READ_BYTES):
        part = view[at : at + READ_BYTES]
        done = 0
        while done < len(part):
            if hasattr(os, "preadv"):
                count = os.preadv(file.fileno(), [part[done:]], start + at + done)
            else:
                file.seek(start + at + done)
                count = file.readinto(part[done:])  # type: ignore[attr-defined]
            if not count:
                raise OSError(f"it ends before byte {start + len(view):,}")
            done += count
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, len(view), os.POSIX_FADV_DONTNEED)
