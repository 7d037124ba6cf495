"""LangGraph and LangChain shorten a history; what stays is moved, not read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import (
    ClearToolUsesEdit,
    ContextEditingMiddleware,
    ToolCallLimitMiddleware,
    wrap_model_call,
)
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.messages.utils import count_tokens_approximately
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from support.questions import sheets


@pytest.fixture
def chat(server) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=server.url,
        api_key="none",
        model=server.model,
        temperature=0,
        max_tokens=64,
        max_retries=0,
        timeout=300,
        extra_body={"kvboost": {"strategy": "query"}},  # moves text not only where it pays
    )


def test_a_trimmed_history_is_moved(chat, knows_every_field, has_run, rows) -> None:
    """The graph keeps all messages, and drops the oldest question and answer from what it sends."""
    sent: list[list[Any]] = []

    def answer(state: MessagesState) -> dict[str, Any]:
        kept = trim_messages(
            state["messages"],
            max_tokens=1_000,
            token_counter=count_tokens_approximately,
            start_on="human",
            include_system=True,
        )
        sent.append(kept)
        return {"messages": [chat.invoke(kept)]}

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer")
    agent = graph.compile(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    system = SystemMessage("You answer questions about a page, in a few words.")
    moved = []
    for number, page in enumerate(sheets("cache", 4)):
        before = rows("moved")
        asked = HumanMessage(f"{page}\n\nWhat is this page about?")
        done = agent.invoke({"messages": [asked] if number else [system, asked]}, thread)
        assert done["messages"][-1].content
        moved.append(rows("moved") - before)
    assert len(done["messages"]) == 9
    assert [len(kept) for kept in sent] == [2, 4, 4, 4]
    assert all(kept[0] == system and kept[-1].content for kept in sent)
    assert max(moved[:2]) < 200 < min(moved[2:])
    has_run("langgraph", "`trim_messages` in a graph, moved text")


def test_langchains_context_editing(chat, knows_every_field, has_run, rows) -> None:
    book = sheets("reuse", 6)
    pages = iter(book)
    cleared: list[int] = []
    moved: list[float] = []

    @tool
    def next_page(name: Literal["reuse"]) -> str:
        """Reads the next page of a book."""
        return next(pages)

    @wrap_model_call
    def observe(request: Any, handler: Callable[[Any], Any]) -> Any:
        cleared.append([one.content for one in request.messages].count("[cleared]"))
        settings = {"parallel_tool_calls": False, "strict": True}
        before = rows("moved")
        answer = handler(request.override(tool_choice="any", model_settings=settings))
        moved.append(rows("moved") - before)
        return answer

    agent = create_agent(
        chat,
        [next_page],
        system_prompt="You read books page by page.",
        middleware=[
            ContextEditingMiddleware(edits=[ClearToolUsesEdit(trigger=1_300, keep=2)]),
            observe,
            ToolCallLimitMiddleware(run_limit=6, exit_behavior="end"),
        ],
    )
    done = agent.invoke({"messages": [HumanMessage("Read the book on reuse.")]})
    results = [one.content for one in done["messages"] if isinstance(one, ToolMessage)]
    assert results[:6] == book  # the agent's own history is whole
    assert cleared == [0, 0, 0, 0, 2, 3, 4]
    assert max(moved[:4]) < 200 < min(moved[4:])
    has_run("langchain", "`create_agent` with `ContextEditingMiddleware`, moved text")
