"""Threads for work of one kind."""

from __future__ import annotations

import asyncio
import threading

from kvboost.serve.workers import Workers


def test_formats_that_take_long_to_compile_delay_no_other_work() -> None:
    compiled = threading.Event()

    async def run() -> str:
        workers = Workers()
        formats = [asyncio.ensure_future(workers.compile(compiled.wait, 60)) for _ in range(40)]
        await asyncio.sleep(0)  # all of them wait for a thread, or have one
        text = await workers.tokenize(3, str.upper, "abc")
        assert not any(one.done() for one in formats)
        compiled.set()
        assert all(await asyncio.gather(*formats))
        return text

    assert asyncio.run(run()) == "ABC"
