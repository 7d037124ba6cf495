"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Smaller inputs take a few milliseconds."""


class Workers:
    """Runs work in threads. Work on large inputs has threads of its own, and few of them: large
    inputs wait for each other, and small inputs never wait for large ones."""

    def __init__(self) -> None:
        # Parsing holds the interpreter's lock: with one thread, the event loop gets it in between.
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="kvboost-parser")
        # Tokenizers release the lock.
        self._tokenizers = ThreadPoolExecutor(2, thread_name_prefix="kvboost-tokenizer")
        # So does the compiler of formats, which may take seconds.
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="kvboost-compiler")

    async def parse(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which parses a body of ``size`` bytes."""
        if size < LARGE_BYTES:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._parser, work, *arguments)

    async def tokenize(self, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which tokenizes ``size`` characters."""
        if size < LARGE_BYTES:
            return await asyncio.to_thread(work, *arguments)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizers, work, *arguments)

    async def compile(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which compiles the format of an answer. Only requests with a
        format wait for each other."""
        return await asyncio.get_running_loop().run_in_executor(self._compilers, work, *arguments)
