"""LangChain and LangGraph."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

from support.questions import NOTES, Verdict


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
    )


def test_a_rag_chain_does_not_read_its_notes_again(chat, has_run) -> None:
    short = chat.bind(max_tokens=8)
    prompt = ChatPromptTemplate.from_messages([("system", "{notes}"), ("user", "{question}")])
    chain = prompt | short | StrOutputParser()
    assert chain.invoke({"notes": NOTES, "question": "When was it lit?"})
    assert "".join(chain.stream({"notes": NOTES, "question": "Who lives there?"}))
    again = short.invoke([SystemMessage(NOTES), HumanMessage("Of what are the steps?")])
    assert again.usage_metadata["input_token_details"]["cache_read"] > 100
    assert len(chain.batch([{"notes": NOTES, "question": word} for word in ("Why?", "How?")])) == 2
    has_run("langchain-openai", "chains, streaming, batches, cached tokens")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, has_run, method) -> None:
    found = chat.with_structured_output(Verdict, method=method).invoke("Think of an animal.")
    assert isinstance(found, Verdict)
    has_run("langchain-openai", f"`with_structured_output`, {method}")


def test_a_react_agent_calls_its_tool(chat, has_run) -> None:
    asked: list[str] = []

    @tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    def model(state: dict[str, Any], runtime: Any) -> Any:
        """A small model may call no tool, or tools for ever: this one does so in one turn."""
        has_result = any(isinstance(message, ToolMessage) for message in state["messages"])
        choice = "none" if has_result else "any"
        return chat.bind_tools([weather], tool_choice=choice, strict=True)

    agent = create_react_agent(model, [weather])
    done = agent.invoke({"messages": [HumanMessage("How is the weather in Rome?")]})
    question, first, *results, last = (message.type for message in done["messages"])
    assert (question, first, last) == ("human", "ai", "ai")
    assert results == ["tool"] * len(asked) and asked  # it may call the tool twice at once
    has_run("langgraph", "`create_react_agent` with a tool")
