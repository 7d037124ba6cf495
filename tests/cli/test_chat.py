"""Conversations in the terminal, with a tiny model."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Callable

import pytest
from rich.console import Console

from kvboost.cli import chat
from kvboost.cli.chat import Conversation
from support.tiny import make_engine, tiny_model

Talk = Callable[..., str]


@pytest.fixture(scope="module")
def engine():
    with make_engine(tiny_model("llama", max_position_embeddings=4096)) as made:
        yield made


@pytest.fixture
def conversation(engine) -> Conversation:
    return Conversation(
        engine, Console(file=io.StringIO(), width=200), max_new_tokens=6, options={"seed": 1}
    )


@pytest.fixture
def talk(conversation) -> Talk:
    """Says lines until one of them ends the conversation; returns what is shown to the user."""

    def talk(*lines: str) -> str:
        left = iter([*lines, ""])
        conversation.run(lambda: next(left))
        return conversation.out.file.getvalue()

    return talk


def test_answers_become_part_of_the_conversation(conversation, talk) -> None:
    shown = talk("hello there", "and again")
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"] * 2
    assert conversation.turns[2]["content"] == "and again"
    assert shown.count("% reused") == 2


@pytest.mark.parametrize("command", ["/exit", "/quit", "/bye"])
def test_a_command_ends_the_conversation(conversation, talk, command) -> None:
    talk(command, "never said")
    assert conversation.turns == []


def test_help_lists_every_command(conversation, talk) -> None:
    shown = talk("/help")
    for command in ("/help", "/clear", "/system TEXT", "/save FILE", "/stats", "/exit"):
        assert command in shown
    assert conversation.turns == []


def test_clear_removes_the_turns_and_keeps_the_system_prompt(conversation, talk) -> None:
    talk("/system Be brief.", "hello", "/clear")
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_system_sets_and_shows_the_system_prompt(conversation, talk) -> None:
    assert "No system prompt" in talk("/system")
    assert "The system prompt is: Be brief." in talk("/system Be brief.", "/system")
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}


def test_save_writes_the_conversation(conversation, talk, tmp_path) -> None:
    path = tmp_path / "said.json"
    assert "2 messages" in talk("hello", f"/save {path}")
    assert json.loads(path.read_text()) == conversation.messages
    assert "needs the name" in talk("/save")
    assert "cannot be written" in talk(f"/save {tmp_path}/nowhere/said.json")


def test_stats_tell_about_the_last_answer_and_the_cache(talk) -> None:
    assert "Nothing was asked yet" in talk("/stats")
    shown = talk("hello", "/stats")
    assert shown.count("% reused") == 2 and "in memory: " in shown


def test_an_unknown_command_is_explained_and_not_sent(conversation, talk) -> None:
    shown = talk("/hlep", "/xyzzy")
    assert "no command /hlep; did you mean /help?" in shown
    assert "no command /xyzzy; /help lists them" in shown
    assert conversation.turns == []


def test_two_slashes_send_a_line_that_begins_with_one(conversation, talk) -> None:
    talk("//etc/hosts is a file")
    assert conversation.turns[0]["content"] == "/etc/hosts is a file"


def test_a_prompt_that_is_too_long_does_not_end_the_conversation(conversation, talk) -> None:
    shown = talk("x" * 5000, "hello")
    assert "context holds 4,096" in shown and "/clear begins a new conversation" in shown
    assert conversation.turns[0]["content"] == "hello"


def test_ctrl_c_stops_the_answer_and_keeps_what_came(conversation, talk, monkeypatch) -> None:
    conversation.max_new_tokens = 400
    conversation.options = {"ignore_eos": True}
    pieces = []

    def interrupt_after_three(piece: str = "\n", **_: object) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat, "print", interrupt_after_three, raising=False)
    shown = talk("hello")
    assert "Stopped." in shown
    assert conversation.last is not None and conversation.last.finish_reason == "cancelled"
    assert 3 <= conversation.last.generated_tokens < 400
    assert conversation.turns[1] == {"role": "assistant", "content": conversation.last.output_text}
    monkeypatch.undo()
    conversation.max_new_tokens = 4
    assert "% reused" in talk("and now")  # the engine still answers
    assert conversation.engine.check_integrity() == []


@pytest.mark.parametrize(("step", "reason"), [(1, None), (40, "cancelled")])
def test_ctrl_c_inside_the_model_stops_the_answer(conversation, talk, step, reason) -> None:
    """In the first step, which reads the prompt, at once; later at the next token."""
    calls = []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == step:
            signal.raise_signal(signal.SIGINT)

    hook = conversation.engine.model.forward.model.register_forward_pre_hook(interrupt)
    conversation.max_new_tokens = 400
    conversation.options = {"ignore_eos": True}
    assert "Stopped." in talk("What is a lighthouse for?")
    hook.remove()
    assert len(calls) < 400
    assert reason is None or conversation.last.finish_reason == reason
    conversation.max_new_tokens = 4
    assert "% reused" in talk("and now")
    assert conversation.engine.check_integrity() == []


def test_ctrl_c_pressed_twice_does_not_wait() -> None:
    before = signal.getsignal(signal.SIGINT)
    with chat.CtrlC() as ctrl_c:
        ctrl_c.can_wait = True
        signal.raise_signal(signal.SIGINT)
        assert ctrl_c.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_ctrl_d_and_ctrl_c_at_the_prompt_end_the_conversation(monkeypatch, capsys, end) -> None:
    def leave(_: str) -> str:
        raise end

    monkeypatch.setattr("builtins.input", leave)
    assert chat.ask_in_terminal() == ""
