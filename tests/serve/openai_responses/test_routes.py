"""The Responses API over an engine without a model."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvboost.errors import StructuredOutputError
from kvboost.serve.openai_responses.replies import ResponseReply
from kvboost.serve.settings import ApiKey
from support.sse import named_events

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


def create(client, **more: Any):
    return client.post("/v1/responses", json={"model": "fake", "input": "hi", **more})


def test_a_whole_response(client) -> None:
    answer = create(client, metadata={"a": "b"}, temperature=0.5, max_output_tokens=9)
    assert answer.status_code == 200
    said = ResponseReply.model_validate(answer.json())
    assert said.id.startswith("resp_") and said.status == "completed" and said.completed_at
    (message,) = said.output
    assert message.type == "message" and message.content[0].text == "Hello"
    assert said.metadata == {"a": "b"} and said.temperature == 0.5 and said.store
    assert said.usage.input_tokens == said.usage.input_tokens_details.cache_write_tokens == 7
    assert said.usage.output_tokens == 2 and said.usage.total_tokens == 9
    assert said.kvboost.computed_tokens == 7
    assert answer.headers["x-kvboost-computed-tokens"] == "7"


def test_options_reach_the_engine(client, fake) -> None:
    same = {"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "ignore_eos": True}
    said = create(client, **same, max_output_tokens=5).json()
    (asked,) = fake.asked
    assert {name: asked[name] for name in same} == same
    assert asked["max"] == 5 and said["kvboost"]["notes"] == []


def test_the_events_of_a_stream(client) -> None:
    events = named_events(create(client, stream=True).text)
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert [event["delta"] for event in events[4:6]] == ["Hel", "lo"]
    assert {event.get("output_index", 0) for event in events} == {0}
    first, last = events[0]["response"], events[-1]["response"]
    assert first["status"] == "in_progress" and first["usage"] is None
    assert last["id"] == first["id"] and last["output"] == [events[-2]["item"]]
    ResponseReply.model_validate(last)


@pytest.mark.usefixtures("calls")
def test_reasoning_text_and_calls_are_items(client) -> None:
    whole = create(client, tools=[WEATHER]).json()["output"]
    events = named_events(create(client, tools=[WEATHER], stream=True).text)
    reasoning, message, call = whole
    assert reasoning["type"] == "reasoning" and reasoning["content"][0]["text"] == "hm"
    assert message["content"][0]["text"] == "I look."
    assert call["name"] == "weather" and call["arguments"] == '{"city": "Rome"}'
    assert call["call_id"].startswith("call_")
    streamed = events[-1]["response"]["output"]
    assert _without_ids(streamed) == _without_ids(whole)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed
    kinds = [event["type"] for event in events]
    at = kinds.index("response.function_call_arguments.done")
    assert kinds[at - 3 : at + 2] == [
        "response.output_item.added",
        *["response.function_call_arguments.delta"] * 2,
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert "response.reasoning_text.delta" in kinds
    ResponseReply.model_validate(events[-1]["response"])


def _without_ids(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    hidden = ("id", "call_id")
    return [{name: item[name] for name in item if name not in hidden} for item in output]


@pytest.mark.usefixtures("calls")
def test_a_conversation_is_continued(client, fake) -> None:
    first = create(client, tools=[WEATHER], instructions="Be brief.").json()
    call_id = first["output"][2]["call_id"]
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    fake.pieces = ["Fine."]
    second = create(
        client, input=[result], previous_response_id=first["id"], instructions="Be kind."
    ).json()
    assert second["previous_response_id"] == first["id"]
    create(client, input="Bye.", previous_response_id=second["id"])
    one, two, three = (conversation.messages for conversation in fake.conversations)
    assert one == [system("Be brief."), {"role": "user", "content": "hi"}]
    kind, hi, said, told = two
    assert (kind, hi) == (system("Be kind."), one[1])  # the old instructions are gone
    assert said["content"] == "I look." and said["reasoning_content"] == "hm"
    assert said["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert told["role"] == "tool" and told["tool_call_id"] == call_id
    assert three[:3] == [hi, said, told]
    assert [message["content"] for message in three[3:]] == ["Fine.", "Bye."]


def test_a_long_conversation_is_tokenized_as_one_however_short_the_request(
    client, fake, monkeypatch
) -> None:
    """Long texts have threads of their own."""
    threads: list[str] = []
    render = fake.render

    def noted(conversation: Any) -> str:
        threads.append(threading.current_thread().name)
        return render(conversation)

    monkeypatch.setattr(fake, "render", noted)
    fake.context_length = None
    first = create(client, input="x" * 100_000).json()
    create(client, previous_response_id=first["id"])
    create(client)
    assert [name.startswith("kvboost-tokenizer") for name in threads] == [True, True, False]


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@pytest.mark.usefixtures("calls")
def test_the_same_conversation_as_items(client, fake) -> None:
    """What a response has sent can be sent back."""
    output = create(client, tools=[WEATHER]).json()["output"]
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "sunny"}
    create(client, input=[{"role": "user", "content": "hi"}, *output, result])
    create(client, input="go on", previous_response_id=create(client, tools=[WEATHER]).json()["id"])
    by_hand, kept = (fake.conversations[number].messages for number in (1, 3))
    assert by_hand[1]["content"] == kept[1]["content"] == "I look."
    assert by_hand[1]["tool_calls"][0]["function"] == kept[1]["tool_calls"][0]["function"]


def test_kept_responses_can_be_read_and_deleted(client, fake) -> None:
    said = create(client).json()
    path = f"/v1/responses/{said['id']}"
    assert client.get(path).json() == said
    refused = client.get(path, params={"stream": "true"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"
    (pin,) = fake.pins()
    assert pin.tokens == 9  # the prompt and the answer
    assert client.delete(path).json() == {"id": said["id"], "object": "response", "deleted": True}
    assert fake.pins() == []
    assert client.put(path).headers["allow"] == "GET, DELETE"
    for gone in (client.get(path), client.delete(path)):
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "response_not_found"
    refused = create(client, previous_response_id=said["id"])
    assert refused.status_code == 404
    assert refused.json()["error"]["param"] == "previous_response_id"


def test_what_is_not_stored_is_not_kept(client, fake) -> None:
    said = create(client, store=False).json()
    assert said["store"] is False and fake.pins() == []
    assert client.get(f"/v1/responses/{said['id']}").status_code == 404


TEXT_PART = {"type": "input_text", "text": "a"}
A_CALL = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "x" * 30_000},
        {"tools": [{**WEATHER, "description": "x" * 30_000}]},
        {"input": [{"role": "user", "content": "a"}] * 50},
        {"input": [{"role": "user", "content": [TEXT_PART] * 50}]},
        {"input": [A_CALL] * 25},
    ],
    ids=["instructions", "tools", "messages", "parts", "calls"],
)
def test_everything_that_is_kept_counts(serve_fake, fake, more: dict[str, Any]) -> None:
    """Only the texts of messages used to count: other fields took any amount of memory."""
    fake.context_length = None
    client = serve_fake(max_stored_bytes=30_000)
    for options, status in (({}, 200), (more, 404)):
        said = create(client, **options).json()
        assert client.get(f"/v1/responses/{said['id']}").status_code == status


def test_responses_belong_to_a_tenant(serve_fake) -> None:
    client = serve_fake(keys=(ApiKey("a", "key-a"), ApiKey("b", "key-b")))
    mine, theirs = ({"authorization": f"Bearer key-{name}"} for name in "ab")
    asked = {"model": "fake", "input": "hi"}
    said = client.post("/v1/responses", json=asked, headers=mine).json()
    path = f"/v1/responses/{said['id']}"
    assert client.get(path, headers=mine).status_code == 200
    assert client.get(path, headers=theirs).status_code == 404
    assert client.delete(path, headers=theirs).status_code == 404
    more = {**asked, "previous_response_id": said["id"]}
    assert client.post("/v1/responses", json=more, headers=theirs).status_code == 404
    assert client.post("/v1/responses", json=more, headers=mine).status_code == 200
    assert client.post("/v1/responses", json=asked).status_code == 401


@pytest.mark.usefixtures("calls")
def test_a_response_that_is_cut_off_is_incomplete(client, fake) -> None:
    """Its call cannot be read, so a conversation that goes on does not have it."""
    fake.pieces, fake.finish_reason = fake.pieces[:-2], "length"
    said = create(client, tools=[WEATHER]).json()
    assert said["status"] == "incomplete" and said["completed_at"] is None
    assert said["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in said["output"]] == ["completed", "completed", "incomplete"]
    events = named_events(create(client, tools=[WEATHER], stream=True).text)
    assert events[-1]["type"] == "response.incomplete"
    create(client, previous_response_id=said["id"])
    assert "tool_calls" not in fake.conversations[-1].messages[1]


def written(arguments: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>\n'


@pytest.mark.parametrize(
    ("said", "num_calls", "num_kept"),
    [
        (written('{"a": 1,}'), 1, 0),
        (written('{"a": 1')[: -len("}\n</tool_call>\n")], 1, 0),
        (written('{"a": ' + "[" * 40 + "]" * 40 + "}"), 1, 0),
        (written('{"a": ' + "9" * 500 + "}"), 1, 0),
        (written("{}", name="get weather"), 1, 1),
        (written("{}") * 129, 129, 129),
    ],
    ids=["no JSON", "cut", "deep", "a long number", "a name", "many"],
)
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_calls_a_model_writes_are_answered_and_kept(
    client, fake, said: str, num_calls: int, num_kept: int, stream: bool
) -> None:
    """The limits of requests are not for what the model writes. A call that cannot be read is no
    part of the conversation."""
    fake.pieces, fake.context_length = ["I look.\n", said], None
    answer = create(client, tools=[WEATHER], stream=stream)
    assert answer.status_code == 200
    response = named_events(answer.text)[-1]["response"] if stream else answer.json()
    assert response["status"] == "completed"
    calls = [item for item in response["output"] if item["type"] == "function_call"]
    assert len(calls) == num_calls
    assert create(client, previous_response_id=response["id"]).status_code == 200
    kept = fake.conversations[-1].messages[1]
    assert kept["content"] == "I look." and len(kept.get("tool_calls", ())) == num_kept


def test_a_stream_that_fails_says_so(client, fake) -> None:
    fake.pieces = ["Hel", RuntimeError("secret")]
    *_, last = named_events(create(client, stream=True).text)
    assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "server_error"
    assert "secret" not in str(last)
    assert client.get(f"/v1/responses/{last['response']['id']}").status_code == 404


def test_an_empty_answer_has_an_empty_message(client, fake) -> None:
    fake.pieces = []
    (message,) = create(client).json()["output"]
    assert message["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include[0]"),
        ({"reasoning": {"effort": "hard"}}, "reasoning.effort"),
        ({"truncation": "some"}, "truncation"),
        ({"user": "x" * 513}, "user"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"verbosity": "none"}}, "text.verbosity"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "x", "arguments": "{"}]},
            "input[0].arguments",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, more, param: str) -> None:
    refused = create(client, **more)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


def test_more_consecutive_calls_than_a_message_may_have_are_refused(client) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    refused = create(client, input=[call] * 129)
    assert refused.status_code == 400
    said = refused.json()["error"]["message"]
    assert "tool_calls must have at most 128 items, not 129" in said


def test_an_error_about_the_format_names_its_field(client, fake, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise StructuredOutputError("schema", "not is not supported")

    monkeypatch.setattr(fake, "answer_options", refuse)
    chosen = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    refused = create(client, text={"format": chosen})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format"


def test_queues_and_missing_models_are_answered_as_in_chat(client, fake) -> None:
    assert create(client, model="other").json()["error"]["code"] == "model_not_found"
    fake.context_length = 5
    assert create(client).json()["error"]["code"] == "context_length_exceeded"


def test_fields_that_change_nothing_are_accepted(client) -> None:
    for more in (
        {"include": ["reasoning.encrypted_content"]},
        {"max_tool_calls": 3},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"effort": "low", "summary": "auto"}},
        {"service_tier": "flex", "prompt_cache_retention": "24h", "background": False},
    ):
        assert create(client, **more).json()["kvboost"]["notes"] == []


def test_a_conversation_loses_its_oldest_messages_if_it_may(client, fake) -> None:
    turns = [
        {"role": role, "content": f"{number} {'x' * 20}"}
        for number in range(4)
        for role in ("user", "assistant")
    ]
    asked = [*turns, {"role": "user", "content": "last"}]
    assert create(client, input=asked).status_code == 400
    said = create(client, input=asked, truncation="auto", instructions="short").json()
    assert said["truncation"] == "auto"
    seen = [one["content"][:5] for one in fake.conversations[-1].messages]
    assert seen == ["short", "3 xxx", "3 xxx", "last"]
    assert create(client, input="x" * 200, truncation="auto").status_code == 400
    items = client.get(f"/v1/responses/{said['id']}/input_items", params={"limit": 100}).json()
    assert len(items["data"]) == 9  # all that was sent


def test_the_items_before_a_response_are_listed(client, fake) -> None:
    fake.context_length = None
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"a": 1}'}
    given = [
        {"role": "user", "content": "hi"},
        call,
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
    ]
    first = create(client, input=given).json()
    second = create(client, input="and?", previous_response_id=first["id"]).json()
    path = f"/v1/responses/{second['id']}/input_items"
    listed = client.get(path, params={"order": "asc"}).json()
    kinds = [one["type"] for one in listed["data"]]
    assert kinds == ["message", "function_call", "function_call_output", "message", "message"]
    assert listed["data"][1]["arguments"] == '{"a": 1}' and not listed["has_more"]
    assert [one["content"][0]["text"] for one in listed["data"][3:]] == ["Hello", "and?"]
    newest = client.get(path, params={"limit": 2}).json()
    assert newest["has_more"] and [one["id"] for one in newest["data"]] == ["msg_4", "msg_3"]
    rest = client.get(path, params={"after": newest["last_id"]}).json()
    assert [one["id"] for one in rest["data"]] == ["fco_2", "fc_1", "msg_0"]
    for params, status in (({"after": "x"}, 404), ({"limit": 0}, 400), ({"order": "up"}, 400)):
        assert client.get(path, params=params).status_code == status
    assert client.get("/v1/responses/resp_x/input_items").status_code == 404
