"""The tiers of one engine, opened as its config says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvboost.cache.secret import Secret
from kvboost.cache.tiers.arena import Arena, GetBlock
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.gpu import ON_THE_WAY, GpuTier
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import RemoteTier, open_remote
from kvboost.cache.tiers.shards import ONE_RANK, Shards
from kvboost.config import EngineConfig


@dataclass(frozen=True)
class Tiers:
    """Where chunks are kept. There is always ``ram``."""

    ram: RamTier
    gpu: GpuTier | None = None
    disk: DiskTier | None = None
    remote: RemoteTier | None = None
    secret: Secret | None = None
    """The secret with which slow tiers sign chunks and make names."""
    shards: Shards = ONE_RANK
    """The division of a chunk among ranks."""


def open_tiers(
    config: EngineConfig,
    device: torch.device,
    locked_memory: GetBlock | None = None,
    page_bytes: int = 0,
    streams: Sequence[torch.cuda.Stream] = (),
) -> Tiers:
    """Where an engine on ``device`` keeps its chunks. If that is an NVIDIA GPU, ``locked_memory``
    gives blocks for those in RAM, from which it must copy on ``streams`` only, or on its default
    one if none is given. ``page_bytes``: the memory of all pages, if chunks on the GPU are in the
    pages of running requests."""
    on_gpu = locked_memory is not None
    secret = Secret(config.cache_secret) if config.cache_secret else None
    arena = None
    if locked_memory is not None:
        # New chunks have memory before others are evicted for them, and what these leave is lent
        # again only when the GPU has done what it was told before.
        most = config.max_cache_bytes + 2 * ON_THE_WAY
        arena = Arena(locked_memory, most, lambda: _Passed(device, streams))
    ram = RamTier(config.max_cache_bytes, pinned=on_gpu, arena=arena)
    gpu = disk = remote = None
    if on_gpu or page_bytes:
        gpu = _open_gpu(config, device, page_bytes)
    if config.disk_cache_dir is not None:
        disk = DiskTier(
            config.disk_cache_dir, config.disk_cache_bytes, allocate=ram.allocate, secret=secret
        )
    if config.remote_cache_url is not None:
        remote = open_remote(config.remote_cache_url, config.remote_cache_bytes, secret=secret)
    return Tiers(ram, gpu, disk, remote, secret)


def _open_gpu(config: EngineConfig, device: torch.device, page_bytes: int) -> GpuTier | None:
    share = config.gpu_cache_bytes
    if page_bytes:
        return GpuTier(_least(share, page_bytes), device, in_pages=True)
    if share is None:
        free = torch.cuda.mem_get_info(device)[0] if config.device_memory is None else 0
        share = min(config.max_cache_bytes, free // 4)
    if not share:
        return None
    # Torch takes all of the memory from the driver: piece by piece, that would hold up requests
    # while the tier fills.
    with suppress(torch.OutOfMemoryError):
        torch.empty(share + ON_THE_WAY, dtype=torch.uint8, device=device)
    return GpuTier(share, device)


def _least(limit: int | None, number: int) -> int:
    return number if limit is None else min(limit, number)


class _Passed:
    """Is passed when ``streams`` have done what they were told so far."""

    def __init__(self, device: torch.device, streams: Sequence[torch.cuda.Stream]) -> None:
        told = streams or [torch.cuda.default_stream(device)]
        self._events = [stream.record_event() for stream in told]

    def query(self) -> bool:
        return all(event.query() for event in self._events)
