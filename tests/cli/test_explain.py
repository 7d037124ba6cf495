"""``kvboost explain``: files of requests, here and at a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.cli.explained_requests import read_requests
from kvboost.errors import ConfigError
from kvboost.serve.settings import ApiKey
from support.homes import use_home
from support.live_server import live_server
from support.scripted_upstream import Handler, say, upstream
from support.tiny import make_engine, save_tiny, tiny_model

SYSTEM = "You are an agent.\nIt is 10:21.\nRead before you write, and test after it.\n"
FILE = "def answer():\n    return 42\n" * 6


def turns() -> list[dict[str, Any]]:
    """Two turns of an agent, whose system prompt changes in between."""
    first = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FILE}]
    said = [{"role": "assistant", "content": "It returns 42."}, {"role": "user", "content": "Why?"}]
    changed = [{**first[0], "content": SYSTEM.replace("10:21", "11:45")}, *first[1:], *said]
    return [{"messages": one} for one in (first, [*first, *said], changed)]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=1024))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    use_home(monkeypatch, tmp_path)
    monkeypatch.delenv("KVBOOST_KEY", raising=False)


def run(*arguments: str, **options: object):
    return CliRunner().invoke(app, ["explain", *arguments], **options)


def written(folder: Path, *requests: dict[str, Any]) -> str:
    file = folder / "turns.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in requests))
    return str(file)


def test_each_turn_is_explained_after_those_before_it(tmp_path, model) -> None:
    done = run(written(tmp_path, *turns()), "-m", model)
    assert done.exit_code == 0, done.output
    first, second, third = done.output.split("── request in line ")[1:]
    assert "0% reused" in first and "differs" not in first
    # The answer that the second turn holds was read after the first turn.
    assert "new text" in second and "“It returns 42." not in second.split("compute")[-1]
    assert "line 2" in third and "It is 11:45." in third and "It is 10:21." in third


def test_the_same_for_machines(tmp_path, model) -> None:
    done = run(written(tmp_path, *turns()), "-m", model, "--json", "--mode", "prefix_cache")
    shown = json.loads(done.stdout)
    assert [one["line"] for one in shown] == [1, 2, 3]
    assert shown[2]["divergence"]["line"] == 2
    assert next(part["why"] for part in shown[2]["parts"]) == "prefix"
    assert "mode" in [part["why"] for part in shown[2]["parts"]]


def test_a_prompt_as_plain_text(model) -> None:
    done = run("-", "-m", model, input="Just a prompt.")
    assert done.exit_code == 0 and "14 tokens, 0% reused" in done.output


def test_a_running_server_can_be_asked(tmp_path, monkeypatch) -> None:
    file = written(tmp_path, *turns())
    tiny = tiny_model("llama", max_position_embeddings=1024)
    with (
        make_engine(tiny, reuse_moved="always") as engine,
        live_server(engine, keys=(ApiKey("ann", "k-ann"),)) as server,
    ):
        refused = run(file, "--url", server.url)
        assert refused.exit_code == 2 and "401" in refused.stderr
        monkeypatch.setenv("KVBOOST_KEY", "k-ann")
        done = run(file, "--url", f"{server.url}/v1", "--json")
        shown = json.loads(done.stdout)
        assert shown[2]["divergence"]["line"] == 2
        assert "moved" in [part["why"] for part in shown[2]["parts"]]
        known = next(part for part in shown[1]["parts"] if part["why"] == "prefix")
        assert known["end"] >= len(SYSTEM + FILE) + len("It returns 42.")
    gone = run(file, "--url", server.url)
    assert gone.exit_code == 2 and "give the address of kvboost serve" in gone.stderr
    assert "must begin with http" in run(file, "--url", "localhost").stderr


@pytest.mark.parametrize(
    ("models", "answer", "explanation"),
    [
        ([], {}, {}),
        ({"data": []}, {}, {}),
        ({"data": [{"id": "m"}]}, {"choices": []}, {}),
        ({"data": [{"id": "m"}]}, {"id": "a"}, {"explanations": []}),
        ({"data": [{"id": "m"}]}, {"id": "a"}, {"explanations": [{"parts": [{"kind": "x"}]}]}),
    ],
)
def test_a_server_of_another_kind_is_named(tmp_path, models, answer, explanation) -> None:
    def act(handler: Handler) -> None:
        found = answer if handler.command == "POST" else explanation
        say(200, json.dumps(found).encode())(handler)

    with upstream(act, models=say(200, json.dumps(models).encode())) as server:
        done = run(written(tmp_path, *turns()), "--url", server.url)
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert "answers in another form than kvboost serve" in done.stderr


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ('{"prompt": 3}', "the prompt is '3', not a text"),
        ('{"question": "Why?"}', "is no request; expected"),
        ('{"messages": []}', "must be a list of messages"),
        ('{"messages": ["hi"]}', 'it needs a "role"'),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "is not text"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2"),
        ('[{"prompt": "a"}]', "one JSON array; give one request a line"),
    ],
)
def test_a_file_that_holds_no_requests(text, problem) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_requests("-", lambda: text)


def test_a_prompt_may_begin_with_a_bracket() -> None:
    for text in ("[INST] Why? [/INST]", "[1, 2]"):
        assert [one.text for one in read_requests("-", lambda text=text: text)] == [text]


def test_recorded_requests_and_their_answers(tmp_path) -> None:
    recorded = {"agent": "coder", "session": "1", "input": "Hello.", "output": "Hi."}
    parts = [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]
    asked = {"messages": [{"role": "user", "content": parts}], "tools": [], "max_tokens": 5}
    file = written(tmp_path, recorded, asked)
    first, second = read_requests(file, str)
    assert first.prompt() == "Hello." and first.answer_before(second) == "Hi."
    assert first.body("Hi.") == {"prompt": "Hello.Hi."}
    assert second.prompt().messages[0]["content"] == "Why?"
    assert second.answer_before(None) is None
    with pytest.raises(ConfigError, match=r"FILE .*missing cannot be read"):
        read_requests(str(tmp_path / "missing"), str)
