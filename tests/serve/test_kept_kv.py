"""KV that is pinned for a while."""

from __future__ import annotations

import asyncio

from fake_engine import FakeEngine
from kvboost.serve import kept_kv
from kvboost.serve.kept_kv import KeptKV
from tiny import make_engine, tiny_model


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_longer_text_replaces_its_beginning() -> None:
    async def work() -> None:
        fake = FakeEngine()
        kept = KeptKV(fake)
        await kept.keep("a", [1, 2], "", 60)
        await kept.keep("other salt", [1, 2], "s", 60)
        await kept.keep("long", [1, 2], "", 3600)
        await kept.keep("b", [1, 2, 3], "", 60)
        assert sorted(fake.pinned) == [(1, 2), (1, 2), (1, 2, 3)]  # not "a"
        await kept.release("a")
        await kept.release("b")
        assert sorted(fake.pinned) == [(1, 2), (1, 2)]

    asyncio.run(work())


def test_pins_end() -> None:
    async def work() -> None:
        fake, clock = FakeEngine(), Clock()
        kept = KeptKV(fake, clock)
        await kept.keep("a", [1], "", 60)
        await kept.keep("b", [2], "", 120)
        await kept.keep("none", [3], "", 0)
        clock.now = 60
        await kept.release_expired()
        assert fake.pinned == [(2,)] and kept.num_tokens == 1

    asyncio.run(work())


def test_a_timer_ends_them() -> None:
    async def work() -> None:
        fake = FakeEngine()
        kept = KeptKV(fake)
        await kept.keep("a", [1], "", 1e-6)
        while fake.pinned:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(work(), 60))


def test_the_oldest_are_released_for_new_ones(monkeypatch) -> None:
    async def work() -> None:
        fake = FakeEngine()  # its cache holds 1,000 tokens
        kept = KeptKV(fake)
        for number in range(6):
            await kept.keep(str(number), [number] * 50, "", 60)
        assert [ids[0] for ids in fake.pinned] == [1, 2, 3, 4, 5]
        await kept.keep("too long", [7] * 251, "", 60)
        assert len(fake.pinned) == 5
        monkeypatch.setattr(kept_kv, "MAX_PINS", 2)
        await kept.keep("8", [8], "", 60)
        assert [ids[0] for ids in fake.pinned] == [5, 8]

    asyncio.run(work())


def test_an_engine_pins_what_it_has_read() -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=512)) as engine:
        ids = list(range(5, 69))

        async def work() -> None:
            kept = KeptKV(engine)
            await kept.keep("a", ids, "", 60)
            assert engine.cache_stats()["pinned"] == 0  # nothing was read
            await engine.awarm(ids)
            steps = engine.serving_stats()["steps"]
            await kept.keep("a", ids, "", 60)
            assert engine.cache_stats()["pinned"] == 4
            assert engine.serving_stats()["steps"] == steps
            await kept.release("a")
            assert engine.cache_stats()["pinned"] == 0

        asyncio.run(work())
