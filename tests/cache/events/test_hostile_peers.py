"""Peers on the network that harm whoever publishes: real sockets, as anyone could open them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvboost import KVEvents
from kvboost.cache.events import publisher, replays
from kvboost.cache.events.publisher import EventPublisher
from kvboost.cache.events.replays import END_OF_REPLAY, MOST_CLIENTS, STALLED_SECONDS
from kvboost.cache.events.sender import MAX_UNSENT, Sender
from kvboost.tokens.hashing import as_token_ids, root_key
from support.kv_events import Subscriber

ROOT = root_key("model", "")
WAIT_MS = 60_000


@pytest.fixture
def settings(tmp_path: Path) -> KVEvents:
    return KVEvents(f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")


@pytest.fixture
def sender(settings: KVEvents) -> Iterator[Sender]:
    made = Sender(settings)
    yield made
    made.close()


@contextmanager
def connected(kind: int, endpoint: str | None, **options: int) -> Iterator[zmq.Socket[bytes]]:
    assert endpoint is not None
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    for name, value in options.items():
        socket.setsockopt(getattr(zmq, name), value)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close(0)


def ask(socket: zmq.Socket[bytes], number: int) -> None:
    socket.send_multipart([b"", number.to_bytes(8, "big")])


def answered(sender: Sender, socket: zmq.Socket[bytes]) -> list[int]:
    """The numbers that a client gets up to the end, while the publisher's thread runs."""
    numbers: list[int] = []
    for _ in range(100_000):
        sender.answer_replays()
        while socket.poll(1):
            _, _, number, _ = socket.recv_multipart()
            if number == END_OF_REPLAY:
                return numbers
            numbers.append(int.from_bytes(number, "big"))
    raise AssertionError(f"no end after {len(numbers)} messages")


def events(size: int = 10) -> list[dict[str, Any]]:
    return [{"type": "made up", "text": "x" * size}]


def test_a_subscriber_that_never_reads_keeps_few_messages_waiting(
    sender: Sender, settings: KVEvents
) -> None:
    with connected(zmq.SUB, settings.endpoint, RCVHWM=1) as stalled:
        stalled.setsockopt(zmq.SUBSCRIBE, b"")
        while not stalled.poll(20):  # it has subscribed
            sender.send(events())
        for _ in range(4 * MAX_UNSENT):
            sender.send(events(16_000))
        received = 0
        while stalled.poll(500):
            stalled.recv_multipart()
            received += 1
        assert received < 2 * MAX_UNSENT  # some more are in the buffers of the system


def test_all_clients_get_everything(sender: Sender, settings: KVEvents) -> None:
    """More than are answered at a time, and more messages than wait for one."""
    for _ in range(100):
        sender.send(events(5000))
    with ExitStack() as stack:
        clients = [
            stack.enter_context(connected(zmq.DEALER, settings.replay_endpoint))
            for _ in range(MOST_CLIENTS + 20)
        ]
        for client in clients:
            ask(client, 0)
        for client in clients:
            assert answered(sender, client) == list(range(100))


def test_stalled_clients_make_room_for_others(
    sender: Sender, settings: KVEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(500):
        sender.send(events(20_000))
    assert sender.replays is not None
    now = [0.0]
    monkeypatch.setattr(sender.replays, "_clock", lambda: now[0])
    with ExitStack() as stack:
        for _ in range(MOST_CLIENTS):
            client = connected(zmq.DEALER, settings.replay_endpoint, RCVHWM=1)
            ask(stack.enter_context(client), 0)
        while len(sender.replays) < MOST_CLIENTS:
            sender.answer_replays()
        honest = stack.enter_context(connected(zmq.DEALER, settings.replay_endpoint))
        ask(honest, 499)
        for _ in range(200):
            sender.answer_replays()
        assert len(sender.replays) == MOST_CLIENTS and not honest.poll(0)
        now[0] += STALLED_SECONDS + 1
        assert answered(sender, honest) == [499]


MALFORMED: dict[str, list[bytes]] = {
    "one frame": [b""],
    "three frames": [b"", bytes(8), bytes(8)],
    "a hundred frames": [bytes(8)] * 100,
    "seven bytes": [b"", bytes(7)],
    "nine bytes": [b"", bytes(9)],
    "a megabyte": [b"", bytes(1 << 20)],
    "not for a router": [b"hello"],
}


@pytest.mark.parametrize("request_", MALFORMED)
def test_a_malformed_request_is_ignored(request_: str, sender: Sender, settings: KVEvents) -> None:
    sender.send(events())
    with (
        connected(zmq.DEALER, settings.replay_endpoint) as wrong,
        connected(zmq.DEALER, settings.replay_endpoint) as honest,
    ):
        wrong.send_multipart(MALFORMED[request_])
        ask(honest, 0)
        assert answered(sender, honest) == [0]
        assert not wrong.poll(0)


@pytest.mark.parametrize("number", [3, 2**63 - 1, 2**63, 2**64 - 1], ids=hex)
def test_a_number_beyond_the_last_message_is_answered_with_the_end(
    number: int, sender: Sender, settings: KVEvents
) -> None:
    """The last two are negative for who reads them with a sign."""
    for _ in range(3):
        sender.send(events())
    with connected(zmq.DEALER, settings.replay_endpoint) as client:
        ask(client, number)
        assert answered(sender, client) == []


def test_messages_that_are_not_kept_any_more_are_left_out(
    sender: Sender, settings: KVEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replays, "KEPT_BYTES", 50_000)
    for _ in range(40):
        sender.send(events(5000))
    with connected(zmq.DEALER, settings.replay_endpoint) as client:
        ask(client, 0)
        assert answered(sender, client) == list(range(31, 40))


def flood(endpoint: str | None, stop: threading.Event, started: threading.Event) -> None:
    """Asks for everything, as fast as it can, and reads nothing."""
    with connected(zmq.DEALER, endpoint, RCVHWM=1, SNDTIMEO=100) as socket:
        while not stop.is_set():
            try:
                ask(socket, 0)
            except zmq.Again:
                continue
            started.set()


@pytest.fixture
def flooded(settings: KVEvents) -> Iterator[EventPublisher]:
    """A publisher whose endpoint for replays several peers flood."""
    made = EventPublisher(settings, ROOT, medium="CPU", is_known=lambda key: True)
    stop, started = threading.Event(), threading.Event()
    threads = [
        threading.Thread(target=flood, args=(settings.replay_endpoint, stop, started))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert started.wait(60)
    yield made
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(60)
    ended = not closing.is_alive()
    stop.set()
    for thread in threads:
        thread.join()
    assert ended, "a publisher whose replays are flooded does not end"


def test_a_flood_of_requests_stops_no_message(flooded: EventPublisher, settings: KVEvents) -> None:
    router = Subscriber(settings.endpoint)
    router.join(flooded.on_cleared)
    seen = len(router.events)
    for _ in range(20):
        flooded.on_cleared()
        router.listen_until(lambda router, seen=seen: len(router.events) > seen)
        seen = len(router.events)
    assert flooded.stats().failed == 0
    router.close()


def test_what_waits_is_bounded_by_its_tokens_too(
    settings: KVEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is held up, and texts of a thousand tokens come."""
    monkeypatch.setattr(publisher, "MAX_WAITING_TOKENS", 10_000)
    held, go_on = threading.Event(), threading.Event()

    def hold(send: Callable[[Any], None]) -> Callable[[Any], None]:
        def slow(said: Any) -> None:
            held.set()
            assert go_on.wait(60)
            send(said)

        return slow

    made = EventPublisher(settings, ROOT, medium="CPU", is_known=lambda key: True)
    made.sender.send = hold(made.sender.send)  # type: ignore[method-assign]
    made.on_cleared()
    assert held.wait(60)
    for _ in range(25):
        made.on_stored(as_token_ids(range(1000)), [])
    assert made.stats().dropped == 15
    go_on.set()
    made.close()
    assert made._changes.empty() and made._tokens_put == made._tokens_taken
