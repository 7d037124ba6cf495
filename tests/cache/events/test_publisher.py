"""A store on the network: a subscriber knows what it holds, and is never told of anything else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import zmq

from kvboost import ConfigError, KVEvents
from kvboost.cache.events.publisher import EventPublisher
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.tokens.hashing import ChunkKey, as_token_ids, root_key
from support.chunks import ROOT, chunk_store, packing
from support.kv_events import Subscriber

CHUNK, BLOCK = 8, 4
ROW_BYTES = 2 * 4
OTHER = root_key("model", "a salt")


class Published:
    """A store for ``max_rows``, published."""

    def __init__(self, settings: KVEvents, max_rows: int = 1000, max_waiting: int = 100) -> None:
        tiers = Tiers(RamTier(max_rows * ROW_BYTES))
        self.store = chunk_store(tiers, CHUNK, window=CHUNK)
        self.publisher = EventPublisher(
            settings, ROOT, medium="CPU", is_known=self.store.__contains__, max_waiting=max_waiting
        )
        self.store.listen(self.publisher, ROOT)

    def admit(self, ids: range, exact_rows: int | None = None, root: ChunkKey = ROOT) -> None:
        exact = len(ids) if exact_rows is None else exact_rows
        rows = packing(torch.zeros(2, 1, 1, len(ids), 1))
        self.store.admit(root, as_token_ids(list(ids)), rows, exact_rows=exact, repair="query")

    def close(self) -> None:
        self.publisher.close()
        self.store.close()


Open = Callable[..., tuple[Published, Subscriber]]


@pytest.fixture
def open_store() -> Iterator[Open]:
    opened: list[Published | Subscriber] = []

    def open_(max_rows: int = 1000, **settings: object) -> tuple[Published, Subscriber]:
        chosen = KVEvents("tcp://*:0", **{"block_size": BLOCK, **settings})
        published = Published(chosen, max_rows)
        opened.append(published)
        router = Subscriber(published.publisher.endpoint, chosen.topic)
        opened.append(router)
        router.join(published.publisher.on_cleared)
        return published, router

    yield open_
    for one in reversed(opened):
        one.close()


def prefixes(ids: range) -> set[tuple[int, ...]]:
    return {tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)}


def knows(*texts: range) -> Callable[[Subscriber], bool]:
    expected = {prefix for ids in texts for prefix in prefixes(ids)}
    return lambda router: router.texts == expected


def test_a_subscriber_knows_what_is_stored(open_store: Open) -> None:
    published, router = open_store(topic="kv@here@model")
    published.admit(range(22))
    router.listen_until(knows(range(22)))
    published.admit(range(40))
    router.listen_until(knows(range(40)))
    assert router.topics == {b"kv@here@model"}
    assert router.numbers == sorted(set(router.numbers))
    assert published.publisher.stats().blocks == 10
    with published.store.lookup(ROOT, as_token_ids(list(range(40)))) as known:
        assert known.exact[-1].end == 40


def test_evicted_text_is_taken_back(open_store: Open) -> None:
    published, router = open_store(max_rows=24)
    published.admit(range(24))
    router.listen_until(knows(range(24)))
    published.admit(range(100, 124))
    router.listen_until(knows(range(100, 124)))
    assert {event["medium"] for event in router.events if "medium" in event} == {"CPU"}


def test_forgotten_text_is_taken_back(open_store: Open) -> None:
    published, router = open_store()
    published.admit(range(16))
    published.admit(range(100, 116))
    router.listen_until(knows(range(16), range(100, 116)))
    assert published.store.forget_text([as_token_ids(list(range(16)))]) == 2
    router.listen_until(knows(range(100, 116)))


def test_an_emptied_store_says_so_and_names_the_blocks(open_store: Open) -> None:
    published, router = open_store()
    published.admit(range(16))
    router.listen_until(knows(range(16)))
    router.events.clear()
    published.store.clear()
    router.listen_until(lambda router: bool(router.events))
    router.listen_until(lambda router: router.events[-1]["type"] == "AllBlocksCleared")
    removed = [event for event in router.events if event["type"] == "BlockRemoved"]
    assert sum(len(event["block_hashes"]) for event in removed) == 4
    published.admit(range(16))
    router.listen_until(knows(range(16)))


def test_text_under_a_salt_and_approximate_rows_are_not_announced(open_store: Open) -> None:
    published, router = open_store()
    published.admit(range(200, 232), root=OTHER)
    published.admit(range(300, 332), exact_rows=12)
    published.admit(range(16))
    router.listen_until(knows(range(16), range(300, 312)))
    stored = [event for event in router.events if event["type"] == "BlockStored"]
    told = {token for event in stored for token in event["token_ids"]}
    assert told == {*range(16), *range(300, 312)}


def test_the_end_is_announced(open_store: Open) -> None:
    published, router = open_store()
    published.admit(range(16))
    router.listen_until(knows(range(16)))
    published.publisher.close()
    router.listen_until(knows())


def test_missed_messages_can_be_asked_for(open_store: Open, tmp_path) -> None:
    replay = f"ipc://{tmp_path}/replay"
    published, router = open_store(replay_endpoint=replay, topic="kv")
    published.admit(range(16))
    router.listen_until(knows(range(16)))
    published.admit(range(100, 116))
    router.listen_until(knows(range(16), range(100, 116)))
    asking = zmq.Context.instance().socket(zmq.REQ)
    asking.connect(replay)
    last = router.numbers[-1].to_bytes(8, "big")
    asking.send(last)
    asking.setsockopt(zmq.RCVTIMEO, 20_000)
    assert asking.recv_multipart() == [b"kv", last, router.payloads[-1]]
    asking.close(0)


def test_a_store_never_waits_and_routers_start_anew_when_too_much_happens() -> None:
    """The thread is held back while the queue overflows."""
    hold, held = threading.Event(), threading.Event()
    published = Published(KVEvents("tcp://*:0", block_size=BLOCK), max_waiting=8)
    publisher = published.publisher
    router = Subscriber(publisher.endpoint)
    router.join(publisher.on_cleared)
    published.admit(range(16))
    router.listen_until(knows(range(16)))

    def is_known(key: ChunkKey) -> bool:
        held.set()
        assert hold.wait(120)
        return key in published.store

    publisher.is_known = is_known
    published.store.forget_text([as_token_ids(list(range(16)))])
    assert held.wait(120)
    for start in range(1000, 3000, 100):
        published.admit(range(start, start + 16))
    assert publisher.stats().dropped >= 20 - 8
    hold.set()
    router.listen_until(lambda router: router.events[-1]["type"] == "AllBlocksCleared")
    router.listen_until(knows())
    published.admit(range(1000, 1016))
    router.listen_until(knows(range(1000, 1016)))
    assert publisher.stats().dropped >= 20 and publisher.stats().failed == 0
    published.close()
    router.close()


def test_a_failure_is_counted_and_routers_start_anew(open_store: Open) -> None:
    published, router = open_store()
    published.admit(range(16))
    router.listen_until(knows(range(16)))
    send, failed = published.publisher.sender.send, threading.Event()

    def fail(events: object) -> None:
        published.publisher.sender.send = send  # type: ignore[method-assign]
        failed.set()
        raise RuntimeError("no")

    published.publisher.sender.send = fail  # type: ignore[method-assign, assignment]
    published.admit(range(100, 116))
    assert failed.wait(120)
    published.admit(range(200, 216))
    router.listen_until(knows())
    assert published.publisher.stats().failed == 1
    published.admit(range(200, 216))
    router.listen_until(knows(range(200, 216)))


def test_an_endpoint_in_use_is_refused() -> None:
    published = Published(KVEvents("tcp://*:0"))
    taken = published.publisher.endpoint.replace("0.0.0.0", "*")
    with pytest.raises(ConfigError, match=r"cannot be published at tcp://.*in use"):
        Published(KVEvents(taken))
    published.close()
