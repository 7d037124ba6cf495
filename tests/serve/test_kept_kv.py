"""KV that is pinned for a while."""

from __future__ import annotations

import asyncio

import pytest

from kvboost.serve import kept_kv
from kvboost.serve.auth import Place
from kvboost.serve.kept_kv import KeptKV
from kvboost.tokens.hashing import as_token_ids
from support.fake_engine import FakeEngine
from support.tiny import make_engine, tiny_model

HERE = Place("", "")
ANN, BOB = Place("ann", "a"), Place("bob", "b")


def test_a_longer_text_replaces_its_beginning() -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    kept.keep("a", as_token_ids([1, 2]), HERE, 60)
    kept.keep("other salt", as_token_ids([1, 2]), Place("", "s"), 60)
    kept.keep("long", as_token_ids([1, 2]), HERE, 3600)
    kept.keep("b", as_token_ids([1, 2, 3]), HERE, 60)
    assert list(fake.pinned) == ["kept-other salt", "kept-long", "kept-b"]
    kept.release("a")
    kept.release("b")
    assert list(fake.pinned) == ["kept-other salt", "kept-long"]


def test_pins_that_have_ended_are_forgotten() -> None:
    fake, now = FakeEngine(), [0.0]
    kept = KeptKV(fake, lambda: now[0])
    kept.keep("a", as_token_ids([1]), HERE, 60)
    kept.keep("none", as_token_ids([3]), HERE, 0)
    assert [pin.ttl for pin in fake.pins()] == [60]
    now[0] = 60
    kept.keep("b", as_token_ids([2]), HERE, 120)
    assert list(fake.pinned) == ["kept-b"]


def test_the_oldest_are_released_for_new_ones(monkeypatch) -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    fake.most_pinned = 5
    for number in range(6):
        kept.keep(str(number), as_token_ids([number]), HERE, 60)
    assert list(fake.pinned) == [f"kept-{number}" for number in range(1, 6)]
    monkeypatch.setattr(kept_kv, "MAX_PINS", 2)
    kept.keep("6", as_token_ids([6]), HERE, 60)
    assert list(fake.pinned) == ["kept-5", "kept-6"]


@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_a_tenant_with_many_pins_ends_no_pin_of_another(monkeypatch, limit: str) -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    if limit == "number":
        monkeypatch.setattr(kept_kv, "MAX_PINS", 4)
    else:
        fake.most_pinned = 4
    kept.keep("bob's", as_token_ids([0]), BOB, 3600)
    for number in range(6):
        kept.keep(str(number), as_token_ids([number]), ANN, 300)
    assert list(fake.pinned) == ["kept-bob's", "kept-3", "kept-4", "kept-5"]
    for number in range(1, 4):  # up to an equal part; beyond it, his own oldest ones go
        kept.keep(f"bob's {number}", as_token_ids([number]), BOB, 300)
    assert list(fake.pinned) == ["kept-4", "kept-5", "kept-bob's 2", "kept-bob's 3"]


def test_a_pin_that_is_larger_than_all_of_another_tenant_ends_none_of_them() -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    fake.most_pinned = 3
    for number in range(3):
        kept.keep(str(number), as_token_ids([number]), ANN, 300)
    kept.keep("large", as_token_ids(range(4)), BOB, 300)
    assert list(fake.pinned) == ["kept-0", "kept-1", "kept-2"]


def test_tenants_of_one_salt_keep_their_own_pins() -> None:
    fake = FakeEngine()
    kept = KeptKV(fake)
    kept.keep("ann's", as_token_ids([1, 2]), Place("ann", ""), 60)
    kept.keep("bob's", as_token_ids([1, 2, 3]), Place("bob", ""), 60)
    assert list(fake.pinned) == ["kept-ann's", "kept-bob's"]


def test_an_engine_pins_what_it_has_read() -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=512)) as engine:
        ids = list(range(5, 69))
        kept = KeptKV(engine)
        kept.keep("a", as_token_ids(ids), HERE, 60)
        assert engine.cache_stats()["pinned"] == 0  # nothing was read
        asyncio.run(engine.awarm(ids))
        steps = engine.serving_stats()["steps"]
        kept.keep("a", as_token_ids(ids), HERE, 60)
        assert engine.cache_stats()["pinned"] == 4
        assert engine.serving_stats()["steps"] == steps
        kept.release("a")
        assert engine.cache_stats()["pinned"] == 0
