"""The routes for operators."""

from __future__ import annotations

import json
from typing import Any

import httpx

from kvboost.errors import ContextLengthError
from kvboost.results import AnswerAudit, Healing
from kvboost.serve.settings import ApiKey
from support.live_server import connect, live_server, wait_for

KEYS = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))
ROOT = {"authorization": "Bearer k-root"}
COMPLETION = {"model": "fake", "prompt": "my secret plan"}


def test_warm_reads_documents_and_reports_progress(client, fake) -> None:
    asked = {"documents": ["a", "b"], "header": "h", "cache_salt": "s"}
    answer = client.post("/kvboost/warm", json=asked)
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in answer.text.splitlines()] == [
        {"done": 1, "total": 2, "new_chunks": 1},
        {"done": 2, "total": 2, "new_chunks": 1},
    ]
    assert fake.asked == [{"warm": one, "header": "h", "cache_salt": "s"} for one in "ab"]


def test_warm_leaves_further_contexts_to_idle_time(client, fake) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise ContextLengthError(300, 256)

    asked = {"documents": ["a", "b"], "header": "h", "cache_salt": "s", "contexts": 3}
    lines = client.post("/kvboost/warm", json=asked).text.splitlines()
    assert len(lines) == 3
    assert json.loads(lines[-1]) == {"done": 2, "total": 2, "readings_waiting": 2}
    later = {"warm_later": ["a", "b"], "header": "h", "contexts": 3, "cache_salt": "s"}
    assert fake.asked[-1] == later
    fake.warm_later = refuse
    last = client.post("/kvboost/warm", json=asked).text.splitlines()[-1]
    assert json.loads(last)["error"]["code"] == "context_length_exceeded"
    alone = client.post("/kvboost/warm", json={"documents": ["a"], "contexts": 3}).text
    assert json.loads(alone.splitlines()[-1])["readings_waiting"] == 0  # after which other one?
    for contexts in (0, 5, 1.5):
        answer = client.post("/kvboost/warm", json={"documents": ["a"], "contexts": contexts})
        assert answer.status_code == 400 and "contexts" in answer.json()["error"]["message"]


def test_warm_stops_at_a_document_that_cannot_be_read(client, fake) -> None:
    fake.refuse = ContextLengthError(300, 256)
    assert client.post("/kvboost/warm", json={"documents": ["a"]}).status_code == 400
    fake.refuse = None
    read = fake.awarm

    async def only_the_first(text, header=None, cache_salt=""):
        if text == "b":
            raise ContextLengthError(300, 256)
        return await read(text, header, cache_salt)

    fake.awarm = only_the_first
    lines = client.post("/kvboost/warm", json={"documents": ["a", "b", "c"]}).text.splitlines()
    assert len(lines) == 2
    last = json.loads(lines[-1])
    assert last["done"] == 1 and last["error"]["code"] == "context_length_exceeded"


def test_plan_accepts_the_bodies_of_the_other_routes(client, fake) -> None:
    for asked in (
        {"prompt": "hello"},
        {"prompt": [1, 2, 3, 4, 5]},
        {"model": "fake", "prompt": "hello", "max_tokens": 3, "stream": True},
    ):
        planned = client.post("/kvboost/plan", json=asked).json()
        assert planned["prompt_tokens"] == planned["computed_tokens"] == 5
        assert planned["spans"][0]["text"]
    messages = [{"role": "user", "content": "hi"}]
    assert client.post("/kvboost/plan", json={"messages": messages}).json()["prompt_tokens"] == 7
    assert fake.asked == []


def test_plan_refuses_what_the_other_routes_refuse(client) -> None:
    for asked, status, param in (
        ({}, 400, "prompt"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, None),
        ({"prompt": "a", "model": "gpt-7"}, 404, "model"),
    ):
        refused = client.post("/kvboost/plan", json=asked)
        assert refused.status_code == status and refused.json()["error"]["param"] == param


def test_an_administrator_can_act_for_a_tenant_by_name(serve_fake, fake) -> None:
    client = serve_fake(keys=KEYS)
    client.post("/v1/completions", json=COMPLETION, headers={"authorization": "Bearer k-ann"})
    salt = fake.asked[-1]["cache_salt"]
    client.post("/kvboost/warm", json={"documents": ["a"], "tenant": "ann"}, headers=ROOT)
    assert fake.asked[-1]["cache_salt"] == salt
    asked = {"cache_salt": "", "tenant": "ann"}
    assert client.post("/kvboost/forget", json=asked, headers=ROOT).json() == {"forgotten": 3}
    assert fake.asked[-1] == {"forget_salt": salt}
    unknown = client.post("/kvboost/forget", json={**asked, "tenant": "eve"}, headers=ROOT)
    assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "tenant"


def test_forget_takes_a_text_or_a_salt(client) -> None:
    assert client.post("/kvboost/forget", json={"text": "a"}).json() == {"forgotten": 2}
    for wrong in ({}, {"text": ""}, {"text": "a", "cache_salt": "b"}, {"text": "a", "tenant": "b"}):
        assert client.post("/kvboost/forget", json=wrong).status_code == 400


def test_the_live_view_shows_numbers_and_no_text(client) -> None:
    for name in "abc":
        client.post("/v1/completions", json=COMPLETION, headers={"x-request-id": name})
    answer = client.get("/kvboost/live")
    assert "secret" not in answer.text and "Hello" not in answer.text
    seen = answer.json()
    assert seen["seq"] == 3 and [one["seq"] for one in seen["requests"]] == [1, 2, 3]
    one = seen["requests"][0]
    assert one["prompt_tokens"] == one["computed"] == 14 and one["completion_tokens"] == 2
    assert one["finish_reason"] == "stop" and one["tenant"] == "anyone" and one["ttft_ms"] > 0
    assert [one["request_id"] for one in seen["requests"]] == ["a", "b", "c"]
    assert one["total_ms"] >= one["ttft_ms"] - 1 and seen["healed_requests"] == []
    assert seen["model"] == "fake" and seen["needs_key"] is False
    assert seen["facts"]["architecture"] == "Fake" and seen["audit"]["audited"] == 0
    newer = client.get("/kvboost/live", params={"since": 2}).json()
    assert [one["seq"] for one in newer["requests"]] == [3]


def test_the_live_view_says_how_far_prompts_are_until_their_first_token(fake) -> None:
    fake.pieces = [None]  # it never answers
    with live_server(fake) as server:
        body = json.dumps({**COMPLETION, "n": 2}).encode()

        def reading() -> list[dict[str, Any]]:
            return httpx.get(f"{server.url}/kvboost/live").json()["reading"]

        with connect(server, body):
            wait_for(lambda: len(reading()) == 2)
            one = reading()[0]
            assert one.pop("request_id").startswith("req-")
            zeros = dict.fromkeys(("known_tokens", "moved_tokens", "read_tokens"), 0)
            assert one == {"prompt_tokens": 14, **zeros, "estimated_ms_without_reuse": None}
        wait_for(lambda: reading() == [])


def test_the_live_view_keeps_the_last_200_answers(client) -> None:
    live = client.app.state.server.live
    for number in range(250):
        live.add(request_id="one", number=number)
    assert [one["seq"] for one in live.since(0)] == list(range(51, 251))


def test_the_cache_view_limits_its_number_of_chunks(client) -> None:
    assert set(client.get("/kvboost/cache").json()) == {"stats", "serving", "chunks"}
    for wrong in ("x", "-1", "1001"):
        refused = client.get("/kvboost/cache", params={"limit": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "limit"


def test_the_live_view_follows_the_healing_of_the_last_answers(client) -> None:
    live = client.app.state.server.live
    healing = [Healing(100 + number) for number in range(20)]
    for number, one in enumerate(healing):
        live.add(one, request_id=f"req-{number}")
    live.add(None, request_id="exact")
    assert [one["approximate_tokens"] for one in live.healed()] == list(range(104, 120))
    healing[-1].healed_tokens, healing[-1].status = 119, "done"
    healing[-1].audit = AnswerAudit(8, 0.75, 6, 0.01)
    assert live.healed()[-1] == {
        "request_id": "req-19",
        "approximate_tokens": 119,
        "healed_tokens": 119,
        "status": "done",
        "audit": {"compared_tokens": 8, "agreement": 0.75, "first_divergence": 6, "mean_kl": 0.01},
    }


def test_a_parameter_of_the_page_is_given_once(client) -> None:
    assert client.get("/kvboost/live?since=1&since=2").status_code == 400
    wrong = client.get("/kvboost/live?since=x").json()["error"]
    assert wrong["message"] == "since: must be a whole number, not 'x'"
    assert client.get("/kvboost/cache?limit=5&limit=6").status_code == 400
