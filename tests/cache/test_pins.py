"""Pins: named, bounded, and over when their time is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from kvboost.cache.lookup.hits import Hit
from kvboost.cache.pins import Pins
from kvboost.errors import PinError
from kvboost.tokens.hashing import ChunkKey, as_token_ids
from support.chunks import ROOT, make_chunk
from support.clock import Clock

IDS = as_token_ids(range(12))


@dataclass
class Text:
    """Chunks of four tokens and 100 bytes each."""

    name: str
    hits: list[Hit] = field(default_factory=list)

    def take(self, count: int) -> list[Hit]:
        for number in range(len(self.hits), count):
            start, key = 4 * number, f"{self.name}{number}"
            info = make_chunk(IDS[start : start + 4], position=start, key=key).info
            self.hits.append(Hit(replace(info, nbytes=100), start, 4, tier="ram"))
        return self.hits[:count]


def test_a_pin_is_renewed_grows_and_is_dropped() -> None:
    clock = Clock(0.0)
    pins, text = Pins(clock=clock), Text("a")
    assert pins.set("chat", ROOT, IDS, text.take(1), ttl=10).tokens == 4
    clock.now = 6
    renewed = pins.set("chat", ROOT, IDS, text.take(3), ttl=10)
    assert (renewed.tokens, renewed.chunks, renewed.bytes, renewed.ttl) == (12, 3, 300, 10)
    clock.now = 11
    (listed,) = pins.all()
    assert listed.name == "chat" and listed.ttl == 5
    assert pins.drop("chat") == listed and pins.drop("chat") is None
    assert len(pins) == pins.nbytes == 0


def test_an_expired_pin_holds_nothing() -> None:
    clock = Clock(0.0)
    pins, text, other = Pins(clock=clock), Text("a"), Text("b")
    pins.set("short", ROOT, IDS, text.take(2), ttl=5)
    pins.set("long", ROOT, IDS, text.take(1), ttl=50)
    pins.set("for ever", ROOT, IDS, other.take(1))
    clock.now = 5
    assert [pin.name for pin in pins.all()] == ["long", "for ever"]
    assert ChunkKey("a0") in pins and ChunkKey("a1") not in pins
    clock.now = 1e9
    assert ChunkKey("a0") not in pins and ChunkKey("b0") in pins
    assert [pin.name for pin in pins.all()] == ["for ever"]


def test_the_budget_counts_shared_chunks_once_and_refuses_more() -> None:
    pins, text, other = Pins(max_bytes=300), Text("a"), Text("b")
    pins.set("one", ROOT, IDS, text.take(2))
    pins.set("two", ROOT, IDS, text.take(2))
    assert pins.nbytes == 200
    with pytest.raises(PinError, match=r"max_pinned_bytes"):
        pins.set("three", ROOT, IDS, other.take(2))
    assert {pin.name for pin in pins.all()} == {"one", "two"} and pins.nbytes == 200
    pins.drop("two")
    pins.set("one", ROOT, IDS, other.take(3))  # in place of what it held
    assert pins.nbytes == 300
    with pytest.raises(PinError):
        pins.set("one", ROOT, IDS, [*other.take(3), *text.take(2)])
    assert pins.nbytes == 300


def test_a_pin_that_lost_chunks_holds_what_is_found_and_no_more_of_its_text() -> None:
    pins, text, healed, elsewhere = Pins(), Text("a"), Text("h"), ChunkKey("01")
    pins.set("healed", ROOT, IDS, text.take(3))
    pins.set("forgotten", elsewhere, IDS, text.take(3))
    pins.set("other", ROOT, IDS, Text("b").take(1))
    pins.on_gone(ChunkKey("a1"))
    pins.settle(lambda pin: healed.take(2) if pin.root == ROOT else [])
    assert {pin.name: pin.tokens for pin in pins.all()} == {"healed": 8, "other": 4}
    assert ChunkKey("h1") in pins and ChunkKey("a0") not in pins and len(pins) == 3
