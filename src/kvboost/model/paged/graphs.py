"""CUDA graphs: a function over static tensors is recorded once and replayed without Python."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

log = logging.getLogger("kvboost")

Function = Callable[[], torch.Tensor]
"""Reads and writes tensors that stay where they are; returns its result."""

MEMORY_SHARE = 0.05
"""The most of the GPU's memory that graphs may take."""


class Capture(Protocol):
    """Turns a function into one that does the same with less work of the host."""

    def __call__(self, function: Function) -> Function: ...

    @property
    def note(self) -> str | None:
        """Why functions run as they are; None if they are captured."""


class NoCapture:
    """Functions run as they are."""

    def __init__(self, note: str | None = None) -> None:
        self.note = note

    def __call__(self, function: Function) -> Function:
        return function


class GraphCapture:
    """Captures CUDA graphs, all in one pool of memory, until they take ``max_bytes``. A function
    that cannot be captured runs as it is, and so do all later ones."""

    def __init__(self, device: torch.device, max_bytes: int | None = None) -> None:
        self._device = device
        total = torch.cuda.get_device_properties(device).total_memory
        self._max_bytes = int(total * MEMORY_SHARE) if max_bytes is None else max_bytes
        self._pool = torch.cuda.graph_pool_handle()
        self.used_bytes = 0
        self.num_graphs = 0
        self.note: str | None = None

    def __call__(self, function: Function) -> Function:
        if self.note is not None:
            return function
        free = torch.cuda.mem_get_info(self._device)[0]
        if self.used_bytes > self._max_bytes:
            self._stop(f"they take {self.used_bytes:,} bytes, more than {self._max_bytes:,}")
            return function
        try:
            graph, result = self._record(function)
        except Exception as error:
            reason = str(error).strip().splitlines() or [""]
            self._stop(f"{type(error).__name__}: {reason[0]}")
            return function
        self.num_graphs += 1
        self.used_bytes += max(0, free - torch.cuda.mem_get_info(self._device)[0])

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

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

    def _stop(self, reason: str) -> None:
        torch.cuda.synchronize(self._device)
        self.note = f"no more CUDA graphs after {self.num_graphs}: {reason}"
        log.warning("%s; other decode steps run without", self.note)
