"""Fields that other projects' clients send: honoured, accepted, or left out with a note."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.serve.app import create_app
from kvboost.serve.settings import ServerSettings
from support.live_server import events
from support.tiny import EOS, byte_tokenizer, make_engine, tiny_model

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "fake", "prompt": "hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "ignore_eos": (True, {"ignore_eos": True}),
    "min_tokens": (2, {"min_new_tokens": 2}),
    "stop_token_ids": ([7], {"stop_token_ids": [7]}),
    "include_stop_str_in_output": (True, {"include_stop": True}),
    "skip_special_tokens": (False, {"skip_special_tokens": False}),
    "bad_words": (["no"], {"bad_words": ["no"]}),
    "allowed_token_ids": ([1, 2], {"allowed_token_ids": [1, 2]}),
    "repeat_penalty": (1.5, {"repetition_penalty": 1.5}),
    "json_schema": (SCHEMA, {"schema": SCHEMA}),
    "regex": ("a+", {"regex": "a+"}),
    "ebnf": ('root ::= "a"', {"grammar": 'root ::= "a"'}),
    "grammar": ('root ::= "a"', {"grammar": 'root ::= "a"'}),
    "response_format": ({"type": "json_object"}, {"schema": {"type": "object"}}),
}
"""Fields of chat and completions, and the options of the engine that they become."""

ACCEPTED: dict[str, list[Any]] = {
    "priority": [3],
    "request_id": ["mine"],
    "length_penalty": [1.0, 0.8],
    "early_stopping": [True],
    "use_beam_search": [False],
    "spaces_between_special_tokens": [True, False],
    "cache_prompt": [True],
    "add_special_tokens": [False],
    "best_of": [1],
    "user": ["me"],
}
OF_CHAT: dict[str, list[Any]] = {
    "store": [True, False],
    "verbosity": ["low", "medium", "high"],
    "service_tier": ["flex", "auto", "default"],
    "prompt_cache_retention": ["in_memory"],
    "prompt_cache_key": ["k"],
    "safety_identifier": ["u"],
    "metadata": [{"a": "b"}],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
    "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True],
    "reasoning_effort": ["none", None],
    "messages": [[{"role": "user", "content": "hi", "name": "ann"}]],
    "prediction": [{"type": "content", "content": "Hello"}],
    "add_generation_prompt": [True, False],
}
NULL = (
    *("chat_template", "documents", "mm_processor_kwargs", "kv_transfer_params", "lora_path"),
    *("cache_salt", "kvboost", "stream_options", "nonsense", "logit_bias", "n", "temperature"),
    *("tools", "stop", "logprobs"),
)


def ask(client: TestClient, path: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    given = CHAT if path.endswith("chat/completions") else TEXT
    answer = client.post(path, json={**given, **more})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("field", HONOURED)
def test_a_field_becomes_an_option(client, fake, monkeypatch, path: str, field: str) -> None:
    value, expected = HONOURED[field]
    seen: dict[str, Any] = {}
    monkeypatch.setattr(fake, "compile_format", lambda options: seen.update(options))
    said = ask(client, path, **{field: value})
    assert {**seen, **fake.asked[-1]}.items() >= expected.items()
    assert said["kvboost"]["notes"] == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_fields_that_change_nothing_are_accepted(client, fake, path: str) -> None:
    ask(client, path)
    more = {**OF_CHAT, **{field: [None] for field in NULL}} if "chat" in path else {}
    for field, values in [*ACCEPTED.items(), *more.items()]:
        for value in values:
            assert ask(client, path, **{field: value})["kvboost"]["notes"] == [], field
            assert fake.asked[-1] == fake.asked[0], field


def test_unknown_fields_are_left_out_with_a_note_and_counted(client) -> None:
    part = {"type": "text", "text": "hi", "colour": "red"}
    said = ask(client, top_a=0.5, messages=[{"role": "user", "content": [part], "mood": 1}])
    (note,) = said["kvboost"]["notes"]
    assert note == "fields that this server does not know were left out: top_a, mood, colour"
    assert "kvboost_ignored_fields_total 3.0" in client.get("/metrics").text
    streamed = client.post("/v1/chat/completions", json={**CHAT, "stream": True, "top_a": 1}).text
    assert "left out: top_a" in streamed
    many = {f"unknown_{number}": 1 for number in range(20)}
    (note,) = ask(client, **many)["kvboost"]["notes"]
    assert note.endswith("unknown_7 and 12 more")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "top_a": 1}),
        ("/v1/chat/completions", {**CHAT, "kvboost": {"top_a": 1}}),
        ("/kvboost/forget", {"text": "a", "top_a": 1}),
    ],
)
def test_a_strict_server_refuses_unknown_fields_and_our_own_apis_always_do(
    serve_fake, path: str, body: dict[str, Any]
) -> None:
    refused = serve_fake(strict_fields=True).post(path, json=body)
    assert refused.status_code == 400 and "top_a" in refused.json()["error"]["message"]
    lenient = serve_fake().post(path, json=body)
    assert lenient.status_code == (200 if path.startswith("/v1") and "top_a" in body else 400)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reasoning_effort": "none"}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False},
        ),
    ],
)
def test_reasoning_is_asked_of_the_template(client, fake, given, expected) -> None:
    ask(client, **given)
    assert fake.conversations[-1].template_options == expected


def test_the_last_message_is_continued(client, fake) -> None:
    turns = [*CHAT["messages"], {"role": "assistant", "content": "Well,"}]
    ask(client, messages=turns, continue_final_message=True, add_generation_prompt=False)
    assert fake.conversations[-1].continue_final_message
    refused = client.post(
        "/v1/chat/completions", json={**CHAT, "continue_final_message": True}
    ).json()
    assert refused["error"]["param"] == "continue_final_message"


def test_a_long_prompt_is_truncated_from_the_left(client, fake) -> None:
    ask(client, "/v1/completions", prompt="abc" * 200, truncate_prompt_tokens=5)
    assert bytes(fake.asked[-1]["prompt"]) == b"bcabc"
    ask(client, "/v1/completions", prompt="abc" * 200, truncate_prompt_tokens=-1, max_tokens=20)
    assert len(fake.asked[-1]["prompt"]) == 80  # of a context of 100
    ask(client, messages=[{"role": "user", "content": "x" * 5000}], truncate_prompt_tokens=7)
    assert bytes(fake.asked[-1]["prompt"]) == b"x" * 7


def test_usage_is_in_every_chunk_if_asked_for(client) -> None:
    options = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    chunks = events(client.post("/v1/chat/completions", json={**CHAT, **options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 2
    assert all(chunk["usage"]["prompt_tokens"] == 7 for chunk in chunks)


def test_token_ids_are_returned(client) -> None:
    said = ask(client, return_token_ids=True)
    assert bytes(said["prompt_token_ids"]) == b"user:hi"
    assert said["choices"][0]["token_ids"] == [0, 1]
    said = ask(client, "/v1/completions", return_token_ids=True)
    assert bytes(said["choices"][0]["prompt_token_ids"]) == b"hi"
    body = {**CHAT, "stream": True, "return_token_ids": True}
    chunks = events(client.post("/v1/chat/completions", json=body).text)
    assert bytes(chunks[0]["choices"][0]["prompt_token_ids"]) == b"user:hi"
    sent = [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]]
    assert sent == [0, 1]


@pytest.fixture(scope="module")
def real():
    with make_engine(tiny_model("llama", max_position_embeddings=512)) as engine:
        settings = ServerSettings(served_names=("fake",))
        with TestClient(create_app(engine, settings)) as client:
            yield engine, client


def test_log_likelihoods_as_lm_eval_asks_for_them(real) -> None:
    engine, client = real
    prompt, follow = engine.encode("The tower "), engine.encode("is lit.")
    body = {"prompt": [*prompt, *follow], "max_tokens": 1, "logprobs": 1, "echo": True}
    said = ask(client, "/v1/completions", **body, temperature=0)["choices"][0]
    found = said["logprobs"]
    assert len(found["token_logprobs"]) == len(prompt) + len(follow) + 1
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    logits = engine.score(prompt, follow).logits.log_softmax(-1)
    expected = [float(row[token]) for row, token in zip(logits, follow, strict=True)]
    assert found["token_logprobs"][len(prompt) : -1] == pytest.approx(expected, abs=1e-3)
    best = max(found["top_logprobs"][-2], key=found["top_logprobs"][-2].__getitem__)
    assert best in found["top_logprobs"][-2]
    assert said["text"].startswith("The tower is lit.")
    assert "".join(found["tokens"][: found["text_offset"].index(17)]) == "The tower is lit."


def test_no_tokens_may_be_asked_for_with_echo(real) -> None:
    _, client = real
    body = {"prompt": "The tower", "max_tokens": 0, "echo": True}
    said = ask(client, "/v1/completions", **body, logprobs=0)
    choice = said["choices"][0]
    assert choice["text"] == "The tower" and len(choice["logprobs"]["tokens"]) == 9
    assert said["usage"]["completion_tokens"] == 0
    assert ask(client, "/v1/completions", **body)["choices"][0]["logprobs"] is None
    chunks = events(client.post("/v1/completions", json={**TEXT, **body, "stream": True}).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "The tower"


def test_every_prompt_of_a_stream_is_echoed_with_its_log_probabilities() -> None:
    """The second prompt is read after the first has been answered."""
    body = {"prompt": ["The tower", "The lamp is lit"], "max_tokens": 16, "echo": True}
    body |= {"logprobs": 0, "temperature": 0, "model": "fake"}
    with (
        make_engine(tiny_model("llama"), max_running=1) as engine,
        TestClient(create_app(engine, ServerSettings(served_names=("fake",)))) as client,
    ):
        whole = ask(client, "/v1/completions", **body)["choices"]
        chunks = events(client.post("/v1/completions", json={**body, "stream": True}).text)
    streamed: list[list[float | None]] = [[], []]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        streamed[choice["index"]] += (choice["logprobs"] or {}).get("token_logprobs", [])
    for choice, found in zip(whole, streamed, strict=True):
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-3)


def test_prompt_logprobs_are_in_vllms_format(real) -> None:
    engine, client = real
    ids = engine.encode("The tower")
    (choice,) = ask(client, "/v1/completions", prompt=ids, prompt_logprobs=2)["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(ids) - 1
    for token, told in zip(ids[1:], others, strict=True):
        assert str(token) in told and 2 <= len(told) <= 3
        assert sorted(one["rank"] for one in told.values() if one["rank"]) == [1, 2]
    said = ask(client, prompt_logprobs=0)
    assert len(said["prompt_logprobs"]) == said["usage"]["prompt_tokens"]
    refused = client.post(
        "/v1/completions", json={**TEXT, "prompt_logprobs": 1, "stream": True}
    ).json()
    assert refused["error"]["param"] == "prompt_logprobs"


def test_answers_have_their_least_length_and_go_on_after_the_end(real) -> None:
    _, client = real
    likely_end = {"logit_bias": {str(EOS): 100}, "temperature": 0, "max_tokens": 6}
    assert ask(client, **likely_end)["usage"]["completion_tokens"] == 1
    assert ask(client, **likely_end, min_tokens=3)["usage"]["completion_tokens"] == 4
    assert ask(client, **likely_end, ignore_eos=True)["usage"]["completion_tokens"] == 6
    refused = client.post("/v1/chat/completions", json={**CHAT, "min_tokens": 9, "max_tokens": 4})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens"


def test_a_model_that_cannot_fill_in_the_middle_says_so(real) -> None:
    _, client = real
    refused = client.post("/v1/completions", json={**TEXT, "suffix": "b"})
    assert refused.status_code == 400
    assert "cannot fill in the middle" in refused.json()["error"]["message"]


def test_a_model_with_tokens_for_it_fills_in_the_middle() -> None:
    tokenizer = byte_tokenizer()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with (
        KVBoost.from_model(model, tokenizer) as engine,
        TestClient(create_app(engine, ServerSettings(served_names=("fake",)))) as client,
    ):
        said = ask(client, "/v1/completions", prompt="def f", suffix="end", return_token_ids=True)
        (choice,) = said["choices"]
        prefix, suffix, middle = tokenizer.convert_tokens_to_ids(names)
        before, after = (engine.encode(text, add_special_tokens=False) for text in ("def f", "end"))
        assert choice["prompt_token_ids"] == [prefix, *before, suffix, *after, middle]
        assert engine.decode(before) == "def f"
