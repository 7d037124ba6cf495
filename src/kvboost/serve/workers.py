"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Work on less takes a few milliseconds."""
_LARGE_AT_ONCE = 2


class Workers:
    """Runs work in threads. Work on large inputs has threads of its own, and few of them: large
    inputs wait for each other, and small inputs never wait for large ones."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(_LARGE_AT_ONCE, thread_name_prefix="kvboost-large")

    async def run(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, whose input has ``size`` bytes."""
        if size < LARGE_BYTES:
            return await asyncio.to_thread(work, *arguments)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._large, work, *arguments)
