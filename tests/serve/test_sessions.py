"""Sessions and pins over HTTP."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvboost.errors import PinError
from kvboost.serve.auth import Place
from kvboost.serve.errors import ApiError
from kvboost.serve.sessions import Sessions
from kvboost.serve.settings import ApiKey, ServerSettings

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
ANN, BOB = Place("ann", ""), Place("bob", "")


def say(client, **kvboost: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={**CHAT, "kvboost": kvboost})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_each_turn_renews_the_pin_of_its_session(client, fake) -> None:
    say(client, session="talk-1")
    (name,) = fake.pinned
    assert name.startswith("session-") and fake.pinned[name].ttl == 600
    assert fake.pinned[name].tokens == len("user:hi") + 2
    say(client, session="talk-1", session_ttl=60)
    assert list(fake.pinned) == [name] and fake.pinned[name].ttl == 60
    say(client, session="talk-2")
    shown = client.get("/kvboost/sessions/talk-1").json()
    assert shown["turns"] == 2 and 0 < shown["expires_in"] <= 60 and shown["tokens"] == 9
    ids = [one["id"] for one in client.get("/kvboost/sessions").json()["data"]]
    assert ids == ["talk-1", "talk-2"]
    assert client.delete("/kvboost/sessions/talk-1").json()["deleted"] is True
    assert name not in fake.pinned
    assert client.get("/kvboost/sessions/talk-1").status_code == 404
    other = client.get("/kvboost/sessions/talk-2", params={"cache_salt": "x"})
    assert other.status_code == 404 and "talk-2" in other.json()["error"]["message"]


def test_streams_and_several_answers_pin_once(client, fake) -> None:
    body = {**CHAT, "kvboost": {"session": "s"}, "stream": True, "n": 2}
    assert client.post("/v1/chat/completions", json=body).is_success
    assert client.get("/kvboost/sessions/s").json()["turns"] == 1


def test_an_answer_does_not_depend_on_its_pin(client, fake) -> None:
    fake.pin_cached = _full
    answer = say(client, session="talk")
    assert answer["kvboost"]["notes"] == ["the session's KV is not pinned: no room"]
    assert client.get("/kvboost/sessions").json()["data"] == []


def _full(*_: Any, **__: Any) -> None:
    raise PinError("no room")


def test_wrong_sessions_are_refused(client) -> None:
    for wrong in ({"session": ""}, {"session": "a/b"}, {"session_ttl": 0}, {"session": 1}):
        asked = {**CHAT, "kvboost": wrong}
        refused = client.post("/v1/chat/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == f"kvboost.{next(iter(wrong))}"


def test_sessions_expire_and_are_limited(fake) -> None:
    now = [0.0]
    sessions = Sessions(fake, ServerSettings(max_sessions=1, session_seconds=5), lambda: now[0])
    assert sessions.renew(ANN, "one", [1]) is None
    assert "as many as a key may have" in (sessions.renew(ANN, "two", [1]) or "")
    assert sessions.renew(BOB, "two", [1]) is None
    now[0] = 5.0
    assert sessions.all(ANN) == [] and sessions.renew(ANN, "two", [1]) is None
    with pytest.raises(ApiError, match="it may have expired"):
        sessions.get(ANN, "one")


def test_two_sessions_that_begin_at_once_are_limited(fake) -> None:
    """The second turn ends while the first one's KV is being pinned."""
    sessions = Sessions(fake, ServerSettings(max_sessions=1))
    pin, pinning, problems = fake.pin_cached, threading.Event(), []
    second = threading.Thread(target=lambda: problems.append(sessions.renew(ANN, "two", [1])))

    def slow(name: str, ids: list[int], **options: Any) -> Any:
        if threading.current_thread() is second:
            pinning.set()
        else:
            second.start()
            pinning.wait(0.5)  # until it has passed the check, as it should not
        return pin(name, ids, **options)

    fake.pin_cached = slow
    problems.append(sessions.renew(ANN, "one", [1]))
    second.join(60)
    assert problems[0] is None and "as many as a key may have" in (problems[1] or "")
    assert [one["id"] for one in sessions.all(ANN)] == ["one"]


def test_an_operator_pins_lists_and_unpins(client, fake) -> None:
    made = client.post("/kvboost/pins", json={"text": "a text", "header": "", "ttl": 60}).json()
    assert made["tokens"] == 6 and made["ttl"] == 60
    assert fake.asked[-1] == {"pin": "a text", "header": "", "ttl": 60, "cache_salt": ""}
    assert client.post("/kvboost/pins", json={"token_ids": [1, 2]}).json()["tokens"] == 2
    listed = client.get("/kvboost/pins").json()
    assert [one["name"] for one in listed["data"]] == ["text-1"]
    assert (listed["bytes"], listed["max_bytes"]) == (16, 1000)
    assert client.delete("/kvboost/pins/text-1").json()["name"] == "text-1"
    missing = client.delete("/kvboost/pins/text-1")
    assert missing.status_code == 404 and "text-1" in missing.json()["error"]["message"]
    document = client.post("/kvboost/documents", json={"text": "kept"}).json()
    assert client.post("/kvboost/pins", json={"document_id": document["id"]}).is_success
    assert fake.asked[-1]["pin"] == "kept"
    assert client.post("/kvboost/pins", json={"document_id": "doc_0"}).status_code == 404
    fake.refuse = PinError("no room")
    full = client.post("/kvboost/pins", json={"text": "x"})
    assert full.status_code == 409 and full.json()["error"]["code"] == "pins_full"


def test_only_operators_pin(serve_fake, fake) -> None:
    keys = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))
    client = serve_fake(keys=keys)
    headers = {"authorization": "Bearer k-ann"}
    assert client.post("/kvboost/pins", json={"text": "x"}, headers=headers).status_code == 403
    assert client.get("/kvboost/sessions", headers=headers).is_success
    for_ann = {"text": "x", "tenant": "ann"}
    headers = {"authorization": "Bearer k-root"}
    assert client.post("/kvboost/pins", json=for_ann, headers=headers).is_success
    assert fake.asked[-1]["cache_salt"]
