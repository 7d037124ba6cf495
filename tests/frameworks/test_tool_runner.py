"""The tool runner of Anthropic's client, whose old results the server clears."""

from __future__ import annotations

from typing import Any, Literal

import anthropic
from anthropic import beta_tool

from support.questions import sheets

TURNS, TRIGGER, KEPT = 7, 4, 2
EDITS = {
    "edits": [
        {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
        {
            "type": "clear_tool_uses_20250919",
            "trigger": {"type": "tool_uses", "value": TRIGGER},
            "keep": {"type": "tool_uses", "value": KEPT},
        },
    ]
}


def thought(text: str, said: str) -> dict[str, Any]:
    thinking = {"type": "thinking", "thinking": text, "signature": ""}
    return {"role": "assistant", "content": [thinking, {"type": "text", "text": said}]}


def test_old_results_are_cleared_and_what_follows_is_moved(
    server, knows_every_field, has_run
) -> None:
    """The runner asks for a thread at first, and sends whole conversations once it is refused."""
    client = anthropic.Anthropic(base_url=server.root, api_key="none", max_retries=0, timeout=300)
    pages = iter(sheets("structured", TURNS))
    read: list[str] = []

    @beta_tool
    def next_page(book: Literal["healing"]) -> str:
        """Reads the next page of a book."""
        read.append(next(pages))
        return read[-1]

    runner = client.beta.messages.tool_runner(
        model=server.model,
        max_tokens=64,
        max_iterations=TURNS,
        messages=[
            {"role": "user", "content": "Which books are there?"},
            thought("I know of one.", "One, on healing."),
            {"role": "user", "content": "What is it about?"},
            thought("It begins with rows.", "Rows that are computed again."),
            {"role": "user", "content": "Read it page by page."},
        ],
        tools=[next_page],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        betas=["context-management-2025-06-27"],
        context_management=EDITS,
        extra_body={"temperature": 0, "kvboost": {"strategy": "query"}},  # not only where it pays
    )
    answers = list(runner)
    assert len(answers) == len(read) == TURNS
    edits = [
        {edit.type: edit for edit in answer.context_management.applied_edits} for answer in answers
    ]
    assert [one["clear_thinking_20251015"].cleared_thinking_turns for one in edits] == [1] * TURNS
    cleared = [one.get("clear_tool_uses_20250919") for one in edits]
    first = TRIGGER + 1  # results that the first answer over cleared ones has before it
    assert cleared[:first] == [None] * first
    assert [one.cleared_tool_uses for one in cleared[first:]] == [
        *range(first - KEPT, TURNS - KEPT)
    ]
    assert all(one.cleared_input_tokens > 200 * one.cleared_tool_uses for one in cleared[first:])
    moved = [one.kvboost["moved_tokens"] - one.kvboost["recomputed_tokens"] for one in answers]
    assert max(moved[:first]) < 200 < min(moved[first:])
    assert all(one.usage.cache_read_input_tokens > 200 for one in answers[first:])

    history: list[Any] = []
    runner.set_messages_params(lambda sent: history.extend(sent["messages"]) or sent)
    results = [
        block["content"]
        for message in history
        if message["role"] == "user" and isinstance(message["content"], list)
        for block in message["content"]
    ]
    assert results == read and history[1]["content"][0]["thinking"] == "I know of one."
    has_run("anthropic", "`tool_runner` with context editing, moved text")
