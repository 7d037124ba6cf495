"""Threads for work that would hold up the event loop. Tenants use them in turn."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from kvboost.serve.errors import ApiError

T = TypeVar("T")

LARGE_BYTES = 64 * 1024
"""Smaller inputs take a few milliseconds."""
COMPILERS = 2
MAX_WAITING = 32
"""Formats of one tenant that may wait to be compiled, if there are several tenants."""


class Workers:
    """Runs work in threads. Work on large inputs has threads of its own, and few of them: large
    inputs wait for each other, and small inputs never wait for large ones."""

    def __init__(self) -> None:
        # Parsing holds the interpreter's lock: with one thread, the event loop gets it in between.
        self._parser = Turns(1, "kvboost-parser")
        # Tokenizers release the lock.
        self._tokenizers = Turns(2, "kvboost-tokenizer")
        # So does the compiler of formats, which may take seconds.
        self._compilers = Turns(COMPILERS, "kvboost-compiler")

    async def parse(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which parses or translates ``size`` bytes for ``tenant``."""
        if size < LARGE_BYTES:
            return work(*arguments)
        return await self._parser.run(tenant, work, *arguments)

    async def tokenize(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which tokenizes ``size`` characters for ``tenant``."""
        if size < LARGE_BYTES:
            return await asyncio.to_thread(work, *arguments)
        return await self._tokenizers.run(tenant, work, *arguments)

    async def compile(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which compiles the format of an answer for ``tenant``. Only
        requests with a format wait for each other. Raises ApiError 429 if too many formats of a
        tenant with a name wait."""
        if tenant and (waiting := len(self._compilers.waiting.get(tenant, ()))) >= MAX_WAITING:
            said = f"{waiting} formats of this key wait to be compiled; try again"
            raise ApiError(429, said, "too_many_formats", retry_after=1)
        return await self._compilers.run(tenant, work, *arguments)


class Turns:
    """Threads that tenants use in turn. A tenant with a name never has all of them, so that another
    one need not wait for its work. Work whose caller has left is dropped, unless it has begun. For
    one event loop."""

    def __init__(self, threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._threads = self._free = threads
        self._running: Counter[str] = Counter()
        self.waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant, the one whose turn was longest ago first."""

    async def run(self, tenant: str, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self.waiting.setdefault(tenant, deque()).append(turn)
        self._begin_turns()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():  # it had not begun
                self._leave(tenant, turn)
            else:
                self._end_turn(tenant)
            raise

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._end_turn, tenant)

        running = self._executor.submit(work, *arguments)
        running.add_done_callback(ended)
        return await asyncio.wrap_future(running)

    def _begin_turns(self) -> None:
        """Gives free threads to tenants, those with the least running work first."""
        while self._free and (tenant := self._next_tenant()) is not None:
            waiting = self.waiting.pop(tenant)
            turn = waiting.popleft()
            if waiting:
                self.waiting[tenant] = waiting  # behind all others
            self._free -= 1
            self._running[tenant] += 1
            turn.set_result(None)

    def _next_tenant(self) -> str | None:
        most = max(1, self._threads - 1)
        may = [one for one in self.waiting if not one or self._running[one] < most]
        return min(may, key=lambda tenant: self._running[tenant], default=None)

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        self.waiting[tenant].remove(turn)
        if not self.waiting[tenant]:
            del self.waiting[tenant]

    def _end_turn(self, tenant: str) -> None:
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._begin_turns()
