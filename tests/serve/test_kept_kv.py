"""KV that is pinned for a while."""

from __future__ import annotations

import asyncio

from kvboost.serve import kept_kv
from kvboost.serve.kept_kv import KeptKV
from kvboost.tokens.hashing import as_token_ids
from support.fake_engine import FakeEngine
from support.tiny import make_engine, tiny_model


def test_a_longer_text_replaces_its_beginning() -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    kept.keep("a", as_token_ids([1, 2]), "", 60)
    kept.keep("other salt", as_token_ids([1, 2]), "s", 60)
    kept.keep("long", as_token_ids([1, 2]), "", 3600)
    kept.keep("b", as_token_ids([1, 2, 3]), "", 60)
    assert list(fake.pinned) == ["kept-other salt", "kept-long", "kept-b"]
    kept.release("a")
    kept.release("b")
    assert list(fake.pinned) == ["kept-other salt", "kept-long"]


def test_pins_that_have_ended_are_forgotten() -> None:
    fake, now = FakeEngine(), [0.0]
    kept = KeptKV(fake, lambda: now[0])
    kept.keep("a", as_token_ids([1]), "", 60)
    kept.keep("none", as_token_ids([3]), "", 0)
    assert [pin.ttl for pin in fake.pins()] == [60]
    now[0] = 60
    kept.keep("b", as_token_ids([2]), "", 120)
    assert list(fake.pinned) == ["kept-b"]


def test_the_oldest_are_released_for_new_ones(monkeypatch) -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    fake.most_pinned = 5
    for number in range(6):
        kept.keep(str(number), as_token_ids([number]), "", 60)
    assert list(fake.pinned) == [f"kept-{number}" for number in range(1, 6)]
    monkeypatch.setattr(kept_kv, "MAX_PINS", 2)
    kept.keep("6", as_token_ids([6]), "", 60)
    assert list(fake.pinned) == ["kept-5", "kept-6"]


def test_an_engine_pins_what_it_has_read() -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=512)) as engine:
        ids = list(range(5, 69))
        kept = KeptKV(engine)
        kept.keep("a", as_token_ids(ids), "", 60)
        assert engine.cache_stats()["pinned"] == 0  # nothing was read
        asyncio.run(engine.awarm(ids))
        steps = engine.serving_stats()["steps"]
        kept.keep("a", as_token_ids(ids), "", 60)
        assert engine.cache_stats()["pinned"] == 4
        assert engine.serving_stats()["steps"] == steps
        kept.release("a")
        assert engine.cache_stats()["pinned"] == 0
