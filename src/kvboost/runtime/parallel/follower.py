"""The process of a rank other than 0: does what rank 0 says, until rank 0 ends."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from functools import singledispatchmethod
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvboost.cache.quantize import KVData, Quantizer
from kvboost.cache.tiers.ram import RamTier
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Segment
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.parallel import load_part
from kvboost.reuse.assemble import place_rows
from kvboost.reuse.rope import Rotation
from kvboost.runtime.backend import make_quantizer, rotation_of
from kvboost.runtime.parallel import messages
from kvboost.runtime.parallel.messages import Failure, Message
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
                message = self._link.receive()
                answer = self._try(message)
                if message.answered or isinstance(answer, Failure):
                    self._link.send(answer)
                if isinstance(answer, Failure) and answer.fatal:
                    return

    def _try(self, message: Message) -> object:
        try:
            return self.do(message)
        except Exception as error:
            return Failure(f"{type(error).__name__}: {error}", fatal=not message.answered)

    @singledispatchmethod
    def do(self, message: Message) -> Any:
        """Does what ``message`` says; returns the answer."""
        raise NotImplementedError(type(message).__name__)

    @do.register
    def _(self, message: messages.Load) -> None:
        self._kvs.clear()
        self._parts.clear()
        self._model = load_part(message.name, message.tp_size, **message.options)
        rotation = rotation_of(self._model)
        self._rotation = None if rotation is None else rotation.groups[0]

    @do.register
    def _(self, message: messages.Serve) -> None:
        self._kvs.clear()
        self._parts.clear()
        self._ram = RamTier(sys.maxsize, pinned=self._device.type == "cuda")
        self._quantizer = make_quantizer(
            self._model, self._rotation, self._ram, message.kv_cache_bits
        )

    @do.register
    def _(self, message: messages.NewKV) -> None:
        self._kvs[message.kv] = RequestKV(self._model.forward.uniform_shape, message.num_tokens)

    @do.register
    def _(self, message: messages.Reserve) -> None:
        self._kvs[message.kv].reserve(message.num_tokens)

    @do.register
    def _(self, message: messages.Clear) -> None:
        self._kvs[message.kv].clear(message.start, message.end)

    @do.register
    def _(self, message: messages.Release) -> None:
        for number in message.numbers:
            self._kvs.pop(number, None)
            self._parts.pop(number, None)

    @do.register
    def _(self, message: messages.Run) -> None:
        segments = [self._segment(segment) for segment in message.segments]
        self._hooks = [segment.hook for segment in segments if segment.hook is not None]
        self._model.forward(segments)

    @do.register
    def _(self, message: messages.Observed) -> list[torch.Tensor | None]:
        found = [hook.observed() for hook in self._hooks]
        return [None if seen is None else seen.cpu() for seen in found]

    @do.register
    def _(self, message: messages.Place) -> None:
        data, kv = self._parts[message.part], self._kvs[message.kv]
        where = range(message.start, message.end)
        how = self._quantizer, message.share, message.turn
        place_rows(data, message.base, message.offset, where, kv, *how)

    @do.register
    def _(self, message: messages.PackRows) -> int:
        rows = self._kvs[message.kv].rows(message.start, message.end)
        like = None if message.like is None else self._parts.get(message.like)
        data = self._quantizer.pack(rows, message.start, like, message.common)
        self._parts[message.part] = data
        return data.bits

    @do.register
    def _(self, message: messages.Copy) -> None:
        data = self._parts.get(message.of)
        if data is None:
            return
        try:
            to_host = message.device_type == "cpu"
            copy = data.map(self._ram.own if to_host else lambda one: one.to(self._device))
        except (MemoryError, RuntimeError):  # no memory: this rank has no such part
            return
        self._parts[message.part] = copy

    @do.register
    def _(self, message: messages.Has) -> bool:
        return message.part in self._parts

    @do.register
    def _(self, message: messages.Give) -> KVData | None:
        data = self._parts.get(message.part)
        return None if data is None else data.map(torch.Tensor.cpu)

    @do.register
    def _(self, message: messages.Take) -> None:
        self._parts[message.part] = message.data.map(self._ram.own)

    @property
    def _device(self) -> torch.device:
        return self._model.device

    def _segment(self, message: messages.SegmentMessage) -> Segment:
        positions, absent, hook = message.positions, message.absent, message.hook
        return Segment(
            self._kvs[message.kv],
            message.token_ids.to(self._device),
            positions if isinstance(positions, range) else positions.to(self._device),
            message.num_logits,
            hook=None if hook is None else hook.make_hook(self._rotation, self._device),
            absent=None if absent is None else absent.to(self._device),
            until=message.until,
            as_stock=message.as_stock,
        )


def main(rank: int, size: int, meeting: str, backend: str, file: int, threads: int) -> None:
    """``meeting``: where the ranks find each other; ``file``: the connection to rank 0."""
    torch.set_num_threads(threads)
    os.environ["LOCAL_RANK"] = str(rank)  # transformers picks the device by it
    link = Link(Connection(file))
    link.send("ready")
    join_group(meeting, backend, rank, size)
    Follower(link).serve()
