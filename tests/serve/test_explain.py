"""Explanations over HTTP: each key sees its own answers, in one process and with two."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import httpx
import pytest

from kvboost.results import ReuseReport, Span, SpanKind
from kvboost.serve.errors import ApiError
from kvboost.serve.explanations import MAX_ANSWERS, MAX_BYTES, Explanations
from kvboost.serve.settings import ApiKey
from support.live_server import live_server
from support.remote_server import remote_server
from support.tiny import make_engine, tiny_model

KEYS = (ApiKey("ann", "k-ann"), ApiKey("bob", "k-bob"), ApiKey("root", "k-root", is_admin=True))
MANUAL = "".join(random.Random(7).choices(string.ascii_letters, k=150))
QUERY = {"strategy": "query"}


@pytest.fixture(scope="module", params=[live_server, remote_server])
def client_of(request) -> Iterator[Callable[[str], AbstractContextManager[httpx.Client]]]:
    """Clients with a key, of a server in one process, and of one whose HTTP is in another."""
    options = {"warm": (("manual.txt", MANUAL),), "warm_for": ("ann",), "served_names": ("tiny",)}
    with (
        make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine,
        request.param(engine, keys=KEYS, **options) as server,
    ):

        @contextmanager
        def client(key: str) -> Iterator[httpx.Client]:
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=120) as made:
                yield made

        yield client


def complete(client: httpx.Client, prompt: Any, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "kvboost": QUERY, **more}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def explained(client: httpx.Client, answer: dict[str, Any]) -> dict[str, Any]:
    shown = client.get(f"/kvboost/explain/{answer['id']}").json()
    assert shown["id"] == answer["id"]
    (found,) = shown["explanations"]
    assert sum(part["end"] - part["start"] for part in found["parts"]) == shown["prompt_tokens"]
    return found


def test_a_changed_line_is_named_with_the_text_on_both_sides(client_of) -> None:
    body = "".join(random.Random(1).choices(string.ascii_letters, k=200))
    with client_of("k-ann") as ann:
        complete(ann, f"An agent.\nIt is 10:21.\n{body}")
        found = explained(ann, complete(ann, f"An agent.\nIt is 11:45.\n{body} Why?"))
        assert found["divergence"] == {
            "row": 17,
            "line": 2,
            "before": "It is 1",
            "prompt": "1:45.",
            "cached": "0:21.",
            "replaced": [4, 4],
        }
        reasons = [part["why"] for part in found["parts"]]
        assert reasons == ["prefix", "new", "moved", "last"]
        moved = found["parts"][2]
        assert moved["recomputed"] > 0 and moved["distance"] == 0 and moved["before_then"]
        listed = ann.get("/kvboost/explain").json()["data"]
        assert listed[-1]["id"] and listed[-1]["prompt_tokens"] == 22 + 1 + 200 + 5


def test_another_key_gets_404_and_sees_no_text(client_of) -> None:
    secret = "ann's secret is 4711, and nobody else shall read it. " * 2
    with client_of("k-ann") as ann, client_of("k-bob") as bob, client_of("k-root") as root:
        answer = complete(ann, secret)
        for other in (bob, root):  # not even an administrator
            refused = other.get(f"/kvboost/explain/{answer['id']}")
            assert refused.status_code == 404
            assert refused.json()["error"]["code"] == "answer_not_found"
            ids = [one["id"] for one in other.get("/kvboost/explain").json()["data"]]
            assert answer["id"] not in ids
        found = explained(bob, complete(bob, secret.replace("4711", "0815")))
        assert found["divergence"] is None and "4711" not in str(found)
        same = explained(bob, complete(bob, secret.replace("4711", "4711 ")))
        assert {part["why"] for part in same["parts"]} <= {"prefix", "new", "moved", "last"}
        other_salt = explained(ann, complete(ann, secret, cache_salt="x"))
        assert [part["why"] for part in other_salt["parts"]] == ["new"]
        assert explained(ann, answer)["parts"]


def test_a_plan_tells_a_key_nothing_of_other_salts(client_of) -> None:
    text = "".join(random.Random(3).choices(string.ascii_letters, k=150))
    with client_of("k-ann") as ann, client_of("k-root") as root:
        complete(ann, text)
        complete(root, text, cache_salt="x")
        planned = root.post("/kvboost/plan", json={"model": "tiny", "prompt": text}).json()
        assert [part["why"] for part in planned["explanation"]["parts"]] == ["new"]


@pytest.mark.parametrize("serve", [live_server, remote_server])
def test_without_keys_text_under_another_salt_is_named(serve) -> None:
    with (
        make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine,
        serve(engine, served_names=("tiny",)) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        complete(client, MANUAL, cache_salt="x")
        asked = {"model": "tiny", "prompt": MANUAL, "cache_salt": "y"}
        planned = client.post("/kvboost/plan", json=asked).json()["explanation"]
        for found in (planned, explained(client, complete(client, **asked))):
            assert "salt" in [part["why"] for part in found["parts"]]


def test_tenants_of_a_shared_cache_do_not_see_what_others_have_sent() -> None:
    with (
        make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine,
        live_server(engine, keys=KEYS, served_names=("tiny",), shared_cache=True) as server,
    ):
        seen = {}
        for key, number in (("k-ann", "4711"), ("k-bob", "0815"), ("k-root", "1234")):
            headers = {"authorization": f"Bearer {key}"}
            with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
                answer = complete(client, f"The secret number is {number}. {MANUAL}")
                seen[key] = explained(client, answer)
        assert seen["k-bob"]["divergence"]["prompt"].startswith("0815")
        assert seen["k-bob"]["divergence"]["cached"] is None
        assert "4711" not in str(seen["k-bob"])
        assert seen["k-root"]["divergence"]["cached"][:4] in ("4711", "0815")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prefix"),
    [("/v1/chat/completions", "chatcmpl-"), ("/v1/responses", "resp_"), ("/v1/messages", "msg_")],
)
def test_every_api_with_ids_can_be_asked(client_of, path, prefix, stream) -> None:
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "stream": stream}
    asked["messages"] = [{"role": "user", "content": "Why?"}]
    if path == "/v1/responses":
        asked["input"] = asked.pop("messages")
        asked["max_output_tokens"] = asked.pop("max_tokens")
    with client_of("k-ann") as ann:
        answer = ann.post(path, json=asked)
        assert answer.status_code == 200, answer.text
        found = re.search(rf'"id": ?"({prefix}\w+)"', answer.text)
        assert explained(ann, {"id": found[1]})["prompt_tokens"] == 9


def test_each_prompt_of_a_request_is_explained_once(client_of) -> None:
    with client_of("k-ann") as ann:
        answer = complete(ann, ["One.", "Two!!"], n=2)
        shown = ann.get(f"/kvboost/explain/{answer['id']}").json()
        assert [one["prompt_tokens"] for one in shown["explanations"]] == [4, 5]


def test_moved_text_names_the_document_that_was_warmed(client_of) -> None:
    with client_of("k-ann") as ann, client_of("k-bob") as bob:
        prompt = f"Here is a manual: {MANUAL} What does it say, in one sentence?"
        (moved,) = [
            part
            for part in explained(ann, complete(ann, prompt))["parts"]
            if part["why"] == "moved"
        ]
        assert moved["document"] == "manual.txt"
        complete(bob, MANUAL)
        parts = explained(bob, complete(bob, prompt))["parts"]
        assert "moved" in [part["why"] for part in parts]
        assert {part["document"] for part in parts} == {None}  # bob has no such document


def test_what_is_forgotten_is_in_no_explanation(client_of) -> None:
    with client_of("k-ann") as ann, client_of("k-root") as root:
        answer = complete(ann, "Something that must be forgotten, all of it.")
        assert root.post("/kvboost/forget", json={"text": "all of it."}).is_success
        assert ann.get(f"/kvboost/explain/{answer['id']}").status_code == 404


def test_a_plan_holds_the_same_explanation(client_of) -> None:
    with client_of("k-root") as root:
        complete(root, MANUAL)
        asked = {"model": "tiny", "prompt": f"Read: {MANUAL}{'?' * 40}", "kvboost": QUERY}
        planned = root.post("/kvboost/plan", json=asked).json()
        served = explained(root, complete(root, asked["prompt"]))
        planned["explanation"]["parts"][1]["recomputed"] = served["parts"][1]["recomputed"]
        for part in (*planned["explanation"]["parts"], *served["parts"]):
            del part["detail"]
        assert planned["explanation"]["parts"] == served["parts"]
        assert [part["why"] for part in served["parts"]] == ["new", "moved", "new"]


def report(num_tokens: int) -> ReuseReport:
    return ReuseReport((Span(SpanKind.COMPUTE, 0, num_tokens),))


def test_answers_and_bytes_of_a_key_are_bounded() -> None:
    kept = Explanations()
    for number in range(MAX_ANSWERS + 3):
        kept.keep("ann", f"a-{number}", [report(10)])
    kept.keep("bob", "b-0", [report(10)])
    assert [len(kept.all(owner)) for owner in ("ann", "bob", "eve")] == [MAX_ANSWERS, 1, 0]
    assert kept.all("ann")[0].id == "a-3"
    for number in range(3):  # each takes almost half of the memory
        kept.keep("ann", f"large-{number}", [report(MAX_BYTES // 17)])
    assert [one.id for one in kept.all("ann")] == ["large-1", "large-2"]
    kept.keep("ann", "huge", [report(MAX_BYTES)])
    assert [one.id for one in kept.all("ann")] == ["huge"]
    with pytest.raises(ApiError, match="there is no answer 'a-0' of this key"):
        kept.get("ann", "a-0")
    kept.keep_only(["bob"])
    assert kept.all("ann") == [] and kept.get("bob", "b-0").created
