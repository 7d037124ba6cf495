"""Remote tiers for tests, and what is put there."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import torch
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.local import LocalFileSystem

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.quantize import Quantizer, plain
from kvboost.cache.tiers.remote.redis import MARK_BYTES
from kvboost.cache.tiers.remote.tier import RemoteTier, open_remote
from kvboost.tokens.marks import marks
from support.chunks import make_chunk

PLENTY = 1 << 40


class AsyncFolder(AsyncFileSystemWrapper):
    """A folder behind the interface of object stores; ``stalled``, it does not answer."""

    protocol = "asyncfolder"
    stalled = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(LocalFileSystem(auto_mkdir=True), **kwargs)

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return LocalFileSystem._strip_protocol(path.removeprefix("asyncfolder://"))

    async def _stall(self, *args: Any, **kwargs: Any) -> None:
        await asyncio.sleep(60)

    def __getattribute__(self, name: str) -> Any:
        if name in ("_cat_file", "_info") and AsyncFolder.stalled:
            name = "_stall"
        return super().__getattribute__(name)


fsspec.register_implementation("asyncfolder", AsyncFolder, clobber=True)


def opened(
    url: str, max_bytes: int | None = PLENTY, **kwargs: Any
) -> contextlib.closing[RemoteTier]:
    return contextlib.closing(open_remote(url, max_bytes, **kwargs))


def big_chunk(number: int, num_bytes: int = 1 << 16) -> KVChunk:
    kv = torch.full((2, 1, 1, 8, num_bytes // 64), float(number))
    return make_chunk([number] * 8, data=plain(kv))


def packed_chunk() -> KVChunk:
    rows = torch.randn(2, 2, 2, 70, 16, generator=torch.Generator().manual_seed(7)).bfloat16()
    return make_chunk(range(70), data=Quantizer(4, None).pack(rows, 0), position=0)


def size_of(chunk: KVChunk) -> int:
    return len(codec.encode(chunk))


def counted_size(tier: RemoteTier, chunk: KVChunk) -> int:
    """What a chunk counts with: its value and, where there is an index, its marks."""
    info = chunk.info
    found = set(marks(info.token_ids, salt=bytes.fromhex(info.root)).tolist())
    num_marks = len(found) + (info.parent == info.before != info.root)
    return size_of(chunk) + (MARK_BYTES * num_marks if tier.has_index else 0)


def as_plain(info: ChunkInfo) -> dict[str, Any]:
    return {**vars(info), "token_ids": info.token_ids.tolist()}


def assert_same(found: KVChunk | None, chunk: KVChunk) -> None:
    assert found is not None
    assert as_plain(found.info) == as_plain(chunk.info)
    assert found.data.tensors.keys() == chunk.data.tensors.keys()
    for name, tensor in chunk.data.tensors.items():
        assert found.data.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.data.tensors[name], tensor)


def while_writing(write: Callable[[int], None]) -> Iterator[None]:
    """Calls ``write`` with 0 to 3, each in a thread; yields for as long as one is at work."""
    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        yield
    for thread in threads:
        thread.join()
