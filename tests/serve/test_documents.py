"""Documents: uploaded once, read in the background, and named in messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.errors import ConfigError, ContextLengthError, PinError
from kvboost.serve.app import create_app
from kvboost.serve.auth import Keys, Tenant
from kvboost.serve.documents import Documents
from kvboost.serve.settings import ApiKey, ServerSettings
from support.live_server import wait_for
from support.tiny import byte_tokenizer, tiny_model

KEYS = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))
ANN, ROOT = ({"authorization": f"Bearer k-{name}"} for name in ("ann", "root"))


def upload(client, text: str = "A lighthouse.", **more: Any) -> dict[str, Any]:
    answer = client.post("/kvboost/documents", json={"text": text, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(client, *parts: dict[str, Any], **more: Any) -> Any:
    messages = [{"role": "user", "content": list(parts)}]
    body = {"model": "fake", "messages": messages, **more}
    return client.post("/v1/chat/completions", json=body)


def test_a_document_is_kept_once_and_read_in_the_background(client, fake) -> None:
    first = upload(client, title="Light")
    assert first["tokens"] == len("Light\n\nA lighthouse.") and first["title"] == "Light"
    assert upload(client, title="Light")["id"] == first["id"]
    assert upload(client)["id"] != first["id"]
    wait_for(lambda: client.get(f"/kvboost/documents/{first['id']}").json()["status"] == "ready")
    assert {"warm": "Light\n\nA lighthouse.", "header": None, "cache_salt": ""} in fake.asked
    listed = client.get("/kvboost/documents").json()["data"]
    assert listed[0]["id"] == first["id"] and len(listed) == 2
    assert client.get("/kvboost/documents", params={"cache_salt": "x"}).json()["data"] == []
    gone = client.delete(f"/kvboost/documents/{first['id']}")
    assert gone.json() == {"id": first["id"], "deleted": True}
    assert client.get(f"/kvboost/documents/{first['id']}").status_code == 404


def test_a_file_is_uploaded_as_it_is(client) -> None:
    def send(data: bytes, kind: str = "text/markdown; charset=utf-8") -> Any:
        headers = {"content-type": kind}
        return client.post("/kvboost/files", content=data, headers=headers)

    assert send(b"A lighthouse.").json()["id"] == upload(client)["id"]
    for data, kind, status in (
        (b"x", "application/pdf", 415),
        (b"\xff\xfe\x00", "text/plain", 400),
        (b"", "text/plain", 400),
        (b"x" * 200, "text/plain", 400),  # longer than the context
    ):
        assert send(data, kind).status_code == status


@pytest.mark.parametrize("path", ["files?title=a&title=b", "documents?cache_salt=&cache_salt=x"])
def test_a_parameter_that_is_given_twice_is_named(client, path: str) -> None:
    method = "POST" if path.startswith("files") else "GET"
    headers = {"content-type": "text/plain"}
    answer = client.request(method, f"/kvboost/{path}", content=b"A lamp.", headers=headers)
    assert answer.status_code == 400
    assert "is given 2 times in the address; give it once" in answer.json()["error"]["message"]


def test_a_document_in_a_message_becomes_its_text(client, fake) -> None:
    document = upload(client, title="Light")
    part = {"type": "document", "document_id": document["id"]}
    question = {"type": "text", "text": "Why?"}
    assert ask(client, part, question).status_code == 200
    assert fake.conversations[-1].messages[0]["content"] == "Light\n\nA lighthouse.\nWhy?"
    assert ask(client, {**part, "title": "Other"}, question).status_code == 200
    assert fake.conversations[-1].messages[0]["content"] == "Other\n\nA lighthouse.\nWhy?"


def test_an_unknown_document_is_named(client) -> None:
    document = upload(client)
    for part, more in (
        ({"type": "document", "document_id": "doc_0"}, {}),
        ({"type": "document", "document_id": document["id"]}, {"cache_salt": "other"}),
    ):
        refused = ask(client, part, **more)
        error = refused.json()["error"]
        assert refused.status_code == 404 and part["document_id"] in error["message"]
        assert error["code"] == "document_not_found" and error["param"] == "document_id"
    wrong = ask(client, {"type": "document", "text": "x"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "messages[0].content[0].document_id"


def test_there_is_a_limit(serve_fake) -> None:
    client = serve_fake(max_documents=2, max_document_bytes=20)
    upload(client, "0123456789")
    for text in ("01234567890", "x"):
        answer = client.post("/kvboost/documents", json={"text": text})
        assert answer.status_code == (409 if len(text) > 1 else 200)
    full = client.post("/kvboost/documents", json={"text": "y"})
    assert full.status_code == 409 and full.json()["error"]["code"] == "documents_full"


def test_a_document_that_failed_says_why_and_may_be_sent_again_when_all_places_are_taken(
    serve_fake, fake
) -> None:
    client = serve_fake(max_documents=1)
    fake.refuse = ContextLengthError(200, 100)
    made = upload(client)
    path = f"/kvboost/documents/{made['id']}"
    wait_for(lambda: client.get(path).json()["status"] == "failed")
    assert "200 tokens" in client.get(path).json()["error"]
    fake.refuse = None
    assert upload(client)["id"] == made["id"]
    wait_for(lambda: client.get(path).json()["status"] == "ready")


def test_a_server_reads_its_own_documents_first_and_says_so(fake) -> None:
    """It answers meanwhile, and is not ready before it is done."""

    async def run() -> None:
        settings = ServerSettings(warm=(("a.txt", "A."), ("b.txt", "B.")), pin=True)
        documents = Documents(fake, settings, Keys(settings))
        reading, go_on = asyncio.Event(), asyncio.Event()
        pin = fake.apin

        async def slow(text: str, **options: Any) -> Any:
            reading.set()
            await go_on.wait()
            if text == "B.":
                raise PinError("there is no room")
            return await pin(text, **options)

        fake.apin = slow
        await documents.start()
        await reading.wait()
        assert documents.warming == (0, 2)
        go_on.set()
        while documents.warming is not None:
            await asyncio.sleep(0)
        one, other = documents.all(Tenant().place())
        assert (one.status, other.status, other.error) == ("ready", "failed", "there is no room")
        await documents.delete(one.place, one.id)
        assert fake.pinned == {}
        await documents.stop()

    asyncio.run(run())


@pytest.mark.parametrize(
    "given",
    [
        {"warm": (("a.txt", "A."),)},
        {"warm": (("a.txt", "A."), ("b.txt", "B.")), "mode": "prefix_cache"},
        {"warm": (("a.txt", "A."), ("b.txt", "B.")), "warm_contexts": 1},
    ],
)
def test_documents_of_the_start_are_read_once_where_that_is_enough(fake, given) -> None:
    async def run() -> None:
        settings = ServerSettings(**given)
        documents = Documents(fake, settings, Keys(settings))
        await documents.start()
        documents.add(Tenant(), "", "C.", 1)
        while {"warm": "C.", "header": None, "cache_salt": ""} not in fake.asked:
            await asyncio.sleep(0.01)
        await documents.stop()

    asyncio.run(asyncio.wait_for(run(), 20))
    assert not any("warm_later" in asked for asked in fake.asked)


@pytest.mark.parametrize("refused", [None, ConfigError("it is closed"), ValueError("a defect")])
def test_documents_of_the_start_are_left_to_idle_time_too(fake, refused, caplog) -> None:
    caplog.set_level("INFO")

    async def run() -> None:
        texts = (("a.txt", "A."), ("b.txt", "B."))
        settings = ServerSettings(warm=texts)
        documents = Documents(fake, settings, Keys(settings))
        later = fake.warm_later

        def refusing(*args: Any, **options: Any) -> int:
            fake.refuse = refused
            return later(*args, **options)

        fake.warm_later = refusing
        await documents.start()
        said = "will not be read" if refused else "2 readings in other contexts wait"
        while said not in caplog.text:
            await asyncio.sleep(0.01)
        fake.refuse = None
        documents.add(Tenant(), "", "C.", 1)
        while {"warm": "C.", "header": None, "cache_salt": ""} not in fake.asked:
            await asyncio.sleep(0.01)  # the reader goes on
        await documents.stop()

    asyncio.run(asyncio.wait_for(run(), 20))
    later = {"warm_later": ["A.", "B."], "header": None, "contexts": 4, "cache_salt": ""}
    assert (later in fake.asked) == (refused is None)


def test_the_server_is_not_ready_while_it_warms(client) -> None:
    documents = client.app.state.server.documents
    documents._to_warm = 3
    said = {"status": "warming", "warmed": 0, "to_warm": 3}
    assert client.get("/health").json() == said
    answer = client.get("/ready")
    assert answer.status_code == 503 and answer.json() == said
    assert client.post("/v1/completions", json={"model": "fake", "prompt": "x"}).is_success
    documents._to_warm = 0
    assert client.get("/ready").json() == {"status": "ready"}


@pytest.mark.parametrize("chunking", ["fixed", "document"])
def test_the_kv_of_a_document_is_found_in_a_chat(chunking: str) -> None:
    """Through a real engine: at its own position exactly, after other text as moved rows."""
    text = "The tower is made of pink granite.\n\nIt has one hundred and forty steps.\n\n" * 2
    model = tiny_model("llama", max_position_embeddings=2048)
    options: Any = {"chunk_size": 64, "chunking": chunking, "reuse_moved": "always"}
    with (
        KVBoost.from_model(model, byte_tokenizer(), **options) as engine,
        TestClient(create_app(engine, ServerSettings(served_names=("fake",)))) as client,
    ):
        document = upload(client, text)
        path = f"/kvboost/documents/{document['id']}"
        wait_for(lambda: client.get(path).json()["status"] == "ready")
        part = {"type": "document", "document_id": document["id"]}
        why = {"type": "text", "text": "Why is it red, and who built it?"}
        first = ask(client, part, why, max_tokens=1).json()["kvboost"]
        assert first["exact_tokens"] >= len(text) - 2
        chunks = engine.cache_stats()["chunks"]
        moved = ask(client, {"type": "text", "text": "Look:"}, part, why, max_tokens=1)
        assert moved.json()["kvboost"]["moved_tokens"] >= len(text) - 40
        assert engine.cache_stats()["chunks"] > chunks


def test_tenants_take_turns_and_what_was_deleted_is_not_read(fake) -> None:
    async def run() -> list[str]:
        settings = ServerSettings()
        documents = Documents(fake, settings, Keys(settings))
        ann, bob = Tenant("ann", "a", "a"), Tenant("bob", "b", "b")
        kept = [documents.add(ann, "", f"ann {number}", 1) for number in range(4)]
        documents.add(bob, "", "bob", 1)
        await documents.delete(ann.place(), kept[1].id)
        await documents.start()
        while kept[3].status != "ready":
            await asyncio.sleep(0)
        await documents.stop()
        return [asked["warm"] for asked in fake.asked]

    assert asyncio.run(run()) == ["ann 0", "bob", "ann 2", "ann 3"]


def test_documents_and_sessions_belong_to_their_key_whatever_the_cache_shares(serve_fake) -> None:
    """With a shared cache, other keys used to list, read, use and delete them."""
    keys = (*KEYS, ApiKey("bob", "k-bob"))
    client = serve_fake(keys=keys, shared_cache=True)
    bob = {"authorization": "Bearer k-bob"}
    asked = {"text": "A secret.", "cache_salt": ""}
    document = client.post("/kvboost/documents", json=asked, headers=ANN).json()
    path = f"/kvboost/documents/{document['id']}"
    part = {"type": "document", "document_id": document["id"]}
    chat = {"model": "fake", "messages": [{"role": "user", "content": [part]}]}
    chat["kvboost"] = {"session": "talk"}
    assert client.post("/v1/chat/completions", json=chat, headers=ANN).status_code == 200
    for headers in (bob, ROOT):
        assert client.get("/kvboost/documents", headers=headers).json()["data"] == []
        assert client.get("/kvboost/sessions", headers=headers).json()["data"] == []
        for method in ("GET", "DELETE"):
            assert client.request(method, path, headers=headers).status_code == 404
            gone = client.request(method, "/kvboost/sessions/talk", headers=headers)
            assert gone.status_code == 404
        assert client.post("/v1/chat/completions", json=chat, headers=headers).status_code == 404
    pinned = client.post("/kvboost/pins", json={"document_id": document["id"]}, headers=ROOT)
    assert pinned.status_code == 404
    assert client.get(path, headers=ANN).json()["text"] == "A secret."
    assert client.get("/kvboost/sessions/talk", headers=ANN).json()["turns"] == 1


def test_keys_that_share_a_cache_each_have_the_documents_that_the_server_starts_with(
    serve_fake, fake
) -> None:
    client = serve_fake(keys=KEYS, shared_cache=True, warm=(("a.txt", "A."),), warm_contexts=1)
    for headers in (ANN, ROOT):
        wait_for(
            lambda headers=headers: client.get("/kvboost/documents", headers=headers).json()["data"]
        )
        (one,) = client.get("/kvboost/documents", headers=headers).json()["data"]
        assert one["bytes"] == 2
    assert [asked["warm"] for asked in fake.asked if "warm" in asked] == ["A."]


def test_documents_are_counted_before_their_texts_are_joined(serve_fake, fake) -> None:
    """12,000 parts that name one document used to become gigabytes."""
    client = serve_fake(max_body_bytes=100_000)
    fake.context_length = 10_000
    large = upload(client, "x" * 5000)
    part = {"type": "document", "document_id": large["id"]}
    refused = ask(client, *[part] * 3)
    assert refused.status_code == 400
    assert "more than 14,997 tokens" in refused.json()["error"]["message"]
    assert fake.conversations == []
    fake.context_length = None
    refused = ask(client, *[part] * 30)
    assert refused.status_code == 413 and "150,000 bytes" in refused.json()["error"]["message"]
    assert fake.conversations == []
    assert ask(client, part, {**part, "title": "Again"}).status_code == 200
    assert fake.conversations[-1].messages[0]["content"] == f"{'x' * 5000}\nAgain\n\n{'x' * 5000}"
