"""The process of a rank other than 0: does what rank 0 says, until rank 0 ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvboost.cache.quantize import KVData, Quantizer
from kvboost.cache.tiers.ram import RamTier
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.parallel import load_part
from kvboost.reuse.assemble import place_rows
from kvboost.reuse.rope import Rotation
from kvboost.runtime.backend import make_quantizer, rotation_of
from kvboost.runtime.devices import device_of
from kvboost.runtime.parallel.messages import Call, Failure, SegmentMessage
from kvboost.runtime.parallel.ranks import Link, join_group


class Follower:
    """One rank other than rank 0: its part of the model, its heads of requests and of chunks. It
    decides nothing: budgets, evictions and plans are rank 0's."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._model: LoadedModel
        self._rotation: Rotation | None = None
        self._quantizer: Quantizer
        self._ram: RamTier
        self._kvs: dict[int, RequestKV] = {}
        self._parts: dict[int, KVData] = {}
        self._hooks: list[Hook] = []

    def serve(self) -> None:
        """Returns when rank 0 has ended, or when this rank has failed."""
        with suppress(EOFError, BrokenPipeError, ConnectionResetError):
            while True:
                call: Call = self._link.receive()
                answer = self._try(call)
                if call.is_answered or isinstance(answer, Failure):
                    self._link.send(answer)
                if isinstance(answer, Failure) and answer.fatal:
                    return

    def _try(self, call: Call) -> object:
        self.release(call.released)
        try:
            return call.do(self, *call.args, **call.options)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", fatal=not call.is_answered)

    # What rank 0 calls.

    def load(self, name: str, tp_size: int, options: Mapping[str, Any]) -> None:
        """Loads its part of a model, together with rank 0. There is one model at a time."""
        self._kvs.clear()
        self._parts.clear()
        self._model = load_part(name, tp_size, **options)
        rotation = rotation_of(self._model)
        self._rotation = None if rotation is None else rotation.groups[0]

    def begin_engine(self, kv_cache_bits: int) -> None:
        """An engine with these options begins; the last one has ended. Its chunks are gone."""
        self._kvs.clear()
        self._parts.clear()
        gpu = device_of(self._device).gpu
        self._ram = RamTier(sys.maxsize, pinned=gpu is not None)
        self._quantizer = make_quantizer(self._model, self._rotation, self._ram, kv_cache_bits)

    def new_kv(self, kv: int, num_tokens: int) -> None:
        self._kvs[kv] = RequestKV(self._model.forward.uniform_shape, num_tokens)

    def reserve(self, kv: int, num_tokens: int) -> None:
        self._kvs[kv].reserve(num_tokens)

    def clear(self, kv: int, start: int, end: int) -> None:
        """Rows ``[start, end)`` become zero."""
        self._kvs[kv].clear(start, end)

    def release(self, numbers: Sequence[int]) -> None:
        """Rank 0 has let go of these buffers and chunks."""
        for number in numbers:
            self._kvs.pop(number, None)
            self._parts.pop(number, None)

    def run(self, several: Sequence[SegmentMessage]) -> None:
        """Runs segments, together with all ranks."""
        segments = [one.make(self._kvs[one.kv], self._rotation) for one in several]
        self._hooks = [segment.hook for segment in segments if segment.hook is not None]
        self._model.forward(segments)

    def observed(self) -> list[torch.Tensor | None]:
        """What each hook of the last forward has observed; None for one that observes nothing."""
        found = [hook.observed() for hook in self._hooks]
        return [None if seen is None else seen.cpu() for seen in found]

    def place(
        self,
        kv: int,
        part: int,
        base: int,
        offset: int,
        where: range,
        share: float | None,
        turn: int,
    ) -> None:
        """Copies rows of a chunk as :func:`place_rows` says."""
        data, to = self._parts[part], self._kvs[kv]
        place_rows(data, base, offset, where, to, self._quantizer, share, turn)

    def pack(self, part: int, kv: int, start: int, end: int, like: int | None, common: int) -> int:
        """Keeps a copy of rows ``[start, end)`` as a chunk; returns its bits."""
        rows = self._kvs[kv].rows(start, end)
        known = None if like is None else self._parts.get(like)
        data = self._quantizer.pack(rows, start, known, common)
        self._parts[part] = data
        return data.bits

    def copy(self, part: int, of: int, *, to_host: bool) -> None:
        """Keeps a chunk a second time, in host memory or in that of the device."""
        data = self._parts.get(of)
        if data is None:
            return
        try:
            copy = data.map(self._ram.own if to_host else lambda one: one.to(self._device))
        except (MemoryError, RuntimeError):  # no memory: this rank has no such part
            return
        self._parts[part] = copy

    def has(self, part: int) -> bool:
        """Whether a chunk is here."""
        return part in self._parts

    def give(self, part: int) -> KVData | None:
        """A chunk, in host memory; None if it is not here."""
        data = self._parts.get(part)
        return None if data is None else data.map(torch.Tensor.cpu)

    def take(self, part: int, data: KVData) -> None:
        """Keeps a chunk that rank 0 has read from a slow tier."""
        self._parts[part] = data.map(self._ram.own)

    @property
    def _device(self) -> torch.device:
        return self._model.device


def main(rank: int, size: int, meeting: str, backend: str, file: int, threads: int) -> None:
    """``meeting``: where the ranks find each other; ``file``: the connection to rank 0."""
    torch.set_num_threads(threads)
    os.environ["LOCAL_RANK"] = str(rank)  # transformers picks the device by it
    link = Link(Connection(file))
    link.send("ready")
    join_group(meeting, backend, rank, size)
    Follower(link).serve()
