"""Kept responses: for how long, how many, and whose."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from weakref import ref

import pytest

from kvboost.serve.errors import ApiError
from kvboost.serve.openai_responses.store import StoredResponse, StoredResponses
from kvboost.serve.schema.chat import Message
from kvboost.serve.settings import ServerSettings


def stored(name: str, size: int = 1) -> StoredResponse:
    return StoredResponse({"id": name}, (), 0, size)


def kept(store: StoredResponses, names: Iterable[str], tenant: str = "a") -> str:
    """Those of ``names`` that are still there."""
    found = ""
    for name in names:
        try:
            found += store.get(tenant, name).response["id"]
        except ApiError as error:
            assert error.status == 404
    return found


def test_responses_end() -> None:
    now = [0.0]
    store = StoredResponses(ServerSettings(stored_response_seconds=10), lambda: now[0])
    store.add("a", stored("x"))
    now[0] = 5
    store.add("a", stored("y"))
    assert kept(store, "xy") == "xy" and kept(store, "xy", "b") == ""
    now[0] = 10
    assert kept(store, "xy") == "y"
    now[0] = 15
    assert kept(store, "xy") == ""


def test_responses_end_also_if_their_tenant_sends_nothing_more() -> None:
    now = [0.0]
    store = StoredResponses(ServerSettings(stored_response_seconds=10), lambda: now[0])
    response = stored("x")
    store.add("a", response)
    found = ref(response)
    del response
    now[0] = 10
    assert kept(store, "y", "b") == ""
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("limit", [{"max_stored_responses": 2}, {"max_stored_bytes": 8}])
def test_the_oldest_are_dropped(limit: dict[str, int]) -> None:
    store = StoredResponses(ServerSettings(**limit))
    for name in "xyz":
        store.add("a", stored(name, size=4))
    store.add("b", stored("x", size=4))
    assert kept(store, "xyz") == "yz" and kept(store, "x", "b") == "x"
    if "max_stored_bytes" in limit:
        store.add("c", stored("large", size=9))
        assert kept(store, ["large"], "c") == ""


def test_the_size_of_messages_counts_their_text() -> None:
    parts = [{"type": "text", "text": "b" * 20}, {"type": "text", "text": "c" * 5}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        Message(role="user", content="a" * 100),
        Message.model_validate({"role": "user", "content": parts}),
        Message.model_validate({"role": "assistant", "content": "d", "tool_calls": [call]}),
    ]
    assert [message.size for message in messages] == [100, 26, 9]
