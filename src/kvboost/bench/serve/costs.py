"""The cost of a load for the machine: processor time of the server, and how busy the card is."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvboost.bench.peers.process import Running

LOOP_SECONDS = "kvboost_loop_cpu_seconds_total"
POLL_SECONDS = 0.1


@dataclass
class Costs:
    """Of one load. None: not known."""

    loop_s: float | None = None
    """Processor time of our server's loop."""
    process_s: float | None = None
    """Processor time of all processes of the server."""
    gpu_share: float | None = None
    """The share of the time in which the card ran anything, on average."""


@contextmanager
def watched(server: Running, device: str) -> Iterator[Costs]:
    """The costs of what happens in the block; they are filled in at its end."""
    costs = Costs()
    before = server.metric(LOOP_SECONDS), server.cpu_seconds()
    with _watched_card(device) as shares:
        yield costs
    after = server.metric(LOOP_SECONDS), server.cpu_seconds()
    costs.loop_s, costs.process_s = (
        None if one is None or other is None else other - one
        for one, other in zip(before, after, strict=True)
    )
    costs.gpu_share = sum(shares) / len(shares) if shares else None


@contextmanager
def _watched_card(device: str) -> Iterator[list[float]]:
    """Samples how busy the card is while the block runs; nothing without a card."""
    shares: list[float] = []
    try:
        card = Card(device)
    except OSError:  # no card of NVIDIA
        yield shares
        return
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            shares.append(card.share())

    thread = threading.Thread(target=poll, name="kvboost-bench-card")
    thread.start()
    try:
        yield shares
    finally:
        ended.set()
        thread.join()


class Card:
    """A GPU of NVIDIA, as its driver's library NVML sees it. Raises ``OSError`` without one."""

    def __init__(self, device: str) -> None:
        if device == "cpu":
            raise OSError("a CPU is no card")
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}".encode()
        self._handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._handle))

    def share(self) -> float:
        """The share of the last moments (a sixth of a second to one) in which a kernel ran."""
        rates = (ctypes.c_uint * 2)()  # of the processors, of the memory
        self._call("nvmlDeviceGetUtilizationRates", self._handle, ctypes.byref(rates))
        return rates[0] / 100

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name} of NVML failed with {status}")
