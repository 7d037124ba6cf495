"""CUDA graphs: a function over static tensors is recorded once and replayed without Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

log = logging.getLogger("kvboost")

Function = Callable[[], torch.Tensor]
"""Reads and writes tensors that stay where they are; returns its result."""

MEMORY_SHARE = 0.05
"""The most of the GPU's memory that graphs may take."""


class Capture(Protocol):
    """Turns a function into one that does the same with less work of the host."""

    def __call__(self, function: Function, name: str) -> Function: ...

    @property
    def note(self) -> str | None:
        """Why functions run as they are; None if they are captured."""

    @property
    def num_graphs(self) -> int:
        """The number of captured functions."""

    @property
    def has_room(self) -> bool:
        """Whether functions may be captured before they are needed."""


class NoCapture:
    """Functions run as they are."""

    num_graphs = 0
    has_room = False

    def __init__(self, note: str | None = None) -> None:
        self._note = note

    @property
    def note(self) -> str | None:
        return self._note

    def __call__(self, function: Function, name: str) -> Function:
        return function


@dataclass(frozen=True)
class Recorded:
    """A graph, its result, and the function, which may be all that holds the tensors that the graph
    reads and writes."""

    function: Function
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.result


def make_capture(device: torch.device, graphs: str, memory: int | None = None) -> Capture:
    """``graphs`` is the option of that name; ``memory`` is what the engine may take of the
    device's, None: all."""
    if device.type != "cuda":
        return NoCapture("CUDA graphs need a GPU")
    if graphs == "off":
        return NoCapture("graphs='off'")
    return GraphCapture(device, None if memory is None else int(memory * MEMORY_SHARE))


class GraphCapture:
    """Captures CUDA graphs, all in one pool of memory, until they take ``max_bytes``. A function
    that cannot be captured runs as it is, and so do later ones of the same name."""

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self._device = device
        total = torch.cuda.get_device_properties(device).total_memory
        self._max_bytes = int(total * MEMORY_SHARE) if max_bytes is None else max_bytes
        self._pool = torch.cuda.graph_pool_handle()
        self._reasons: dict[str, str] = {}
        self.used_bytes = 0
        self.num_graphs = 0

    @property
    def note(self) -> str | None:
        if not self._reasons:
            return None
        return "; ".join(f"no CUDA graph of {name}: {why}" for name, why in self._reasons.items())

    @property
    def has_room(self) -> bool:
        return 2 * self.used_bytes <= self._max_bytes

    def __call__(self, function: Function, name: str) -> Function:
        if name in self._reasons:
            return function
        free = torch.cuda.mem_get_info(self._device)[0]
        if self.used_bytes > self._max_bytes:
            taken = f"{self.num_graphs} graphs take {self.used_bytes:,} bytes"
            self._refuse(name, f"{taken}, more than {self._max_bytes:,}")
            return function
        try:
            graph, result = self._record(function)
        except Exception as error:
            torch.cuda.synchronize(self._device)
            reason = str(error).strip().splitlines() or [""]
            self._refuse(name, f"{type(error).__name__}: {reason[0]}")
            return function
        self.num_graphs += 1
        self.used_bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])
        return Recorded(function, graph, result)

    def _record(self, function: Function) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Runs the function once, so that kernels are compiled and libraries have their memory, and
        then records it."""
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy chunks meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        return graph, result

    def _refuse(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        log.warning("no CUDA graph of %s, which runs without: %s", name, reason)
