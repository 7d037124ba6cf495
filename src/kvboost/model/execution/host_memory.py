"""Memory of the host from which a GPU copies at full speed, while it computes."""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys

import torch

log = logging.getLogger("kvboost")


class _Pages(mmap.mmap):
    """Memory of the process that nothing else uses. CUDA forgets it before it is freed."""

    registered_at: int | None = None

    def __del__(self) -> None:
        if self.registered_at is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


def host_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 ``[num_bytes]``, in host memory that a GPU reads without a detour. It has
    exactly this size: ``pin_memory`` would round it up to a power of two. It is freed with the last
    tensor that reads it; a GPU must have read it by then."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    if private is None:  # Windows
        pages = _Pages(-1, num_bytes)
    else:
        pages = _Pages(-1, num_bytes, flags=private | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if torch.cuda.is_available():
        _register(pages, memory)
    return memory


def _register(pages: _Pages, memory: torch.Tensor) -> None:
    """Locks the pages in memory until they are freed. Without that, copies of it are several
    times slower and wait for the host."""
    memory[:: mmap.PAGESIZE].zero_()  # CUDA would fetch each page itself, and hold up all streams
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if status == 0:
        pages.registered_at = memory.data_ptr()
        return
    log.warning(
        "%s bytes of host memory could not be registered with CUDA (error %d): copies of them will "
        "be slow; raise the limit of locked memory (ulimit -l)",
        f"{memory.nbytes:,}",
        status,
    )
