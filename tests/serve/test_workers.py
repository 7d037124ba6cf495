"""Threads for work of one kind."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.http.workers import LARGE_BYTES, MAX_WAITING, Turns, Workers
from support.live_server import wait_for


def test_formats_that_take_long_to_compile_delay_no_other_work() -> None:
    compiled = threading.Event()

    async def run() -> str:
        workers = Workers()
        formats = [asyncio.ensure_future(workers.compile("", compiled.wait, 60)) for _ in range(30)]
        await asyncio.sleep(0)  # all of them wait for a thread, or have one
        text = await workers.tokenize("", 3, str.upper, "abc")
        assert not any(one.done() for one in formats)
        compiled.set()
        assert all(await asyncio.gather(*formats))
        return text

    assert asyncio.run(run()) == "ABC"


class Work:
    """Notes its name and waits until it may go on."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, name: str) -> None:
        self.log.append(name)
        self.begun.set()
        self.go_on.wait(60)

    @property
    def names(self) -> list[str]:
        return [name.rstrip("0123456789") for name in self.log]


@pytest.mark.parametrize("threads", [1, 2])
def test_tenants_take_turns_and_none_has_all_threads(threads: int) -> None:
    """One tenant's ten formats used to hold up all others'."""
    work = Work()

    async def run() -> None:
        turns = Turns(threads, "test")
        many = [asyncio.ensure_future(turns.run("ann", work, f"ann{one}")) for one in range(6)]
        await asyncio.sleep(0)
        wait_for(lambda: work.names == ["ann"])
        few = [asyncio.ensure_future(turns.run("bob", work, f"bob{one}")) for one in range(2)]
        await asyncio.sleep(0)
        while work.names != ["ann", "bob"][:threads]:
            await asyncio.sleep(0.001)
        work.go_on.set()
        await asyncio.gather(*many, *few)

    asyncio.run(run())
    assert sorted(work.names) == ["ann"] * 6 + ["bob"] * 2
    if threads == 1:  # two threads may note their names in any order
        assert work.log.index("bob1") < work.log.index("ann4")


def test_work_is_dropped_when_its_caller_leaves_before_its_turn() -> None:
    work = Work()

    async def run() -> None:
        turns = Turns(1, "test")
        first = asyncio.ensure_future(turns.run("ann", work, "first"))
        left = [asyncio.ensure_future(turns.run("ann", work, f"left{one}")) for one in range(3)]
        last = asyncio.ensure_future(turns.run("bob", work, "last"))
        await asyncio.to_thread(work.begun.wait, 60)
        for one in (first, *left):
            one.cancel()
        await asyncio.gather(first, *left, return_exceptions=True)
        work.go_on.set()
        await last
        await turns.run("ann", work, "again")  # the thread of what was cancelled is free again

    asyncio.run(run())
    assert work.log == ["first", "last", "again"]


@pytest.mark.parametrize("kind", ["parse", "tokenize"])
def test_large_inputs_of_one_tenant_do_not_hold_up_those_of_another(kind: str) -> None:
    work = Work()

    async def run() -> None:
        large = getattr(Workers(), kind)
        many = [
            asyncio.ensure_future(large("ann", LARGE_BYTES, work, f"ann{one}")) for one in range(6)
        ]
        await asyncio.to_thread(work.begun.wait, 60)
        few = asyncio.ensure_future(large("bob", LARGE_BYTES, work, "bob"))
        while kind == "tokenize" and "bob" not in work.log:  # there is a second thread
            await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        work.go_on.set()
        await asyncio.gather(*many, few)

    asyncio.run(run())
    assert sorted(work.names) == ["ann"] * 6 + ["bob"]
    assert work.log.index("bob") <= 2


def test_too_many_waiting_formats_of_a_tenant_are_refused() -> None:
    go_on = threading.Event()

    async def run() -> None:
        workers = Workers()
        waiting = [
            asyncio.ensure_future(workers.compile("ann", go_on.wait, 60))
            for _ in range(MAX_WAITING + 1)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await workers.compile("ann", go_on.wait, 60)
        assert caught.value.status == 429
        other = asyncio.ensure_future(workers.compile("bob", go_on.wait, 60))
        go_on.set()
        assert all(await asyncio.gather(*waiting, other))

    asyncio.run(run())


def test_users_without_keys_are_no_tenant_whose_waiting_formats_are_limited() -> None:
    """All of them together are the tenant without a name."""
    go_on = threading.Event()

    async def run() -> None:
        workers = Workers()
        work = [asyncio.ensure_future(workers.compile("", go_on.wait, 60)) for _ in range(64)]
        await asyncio.sleep(0)
        go_on.set()
        assert all(await asyncio.gather(*work))

    asyncio.run(run())
