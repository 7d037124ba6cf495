"""The OpenAI Agents SDK."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)  # it would send traces to OpenAI


@pytest.mark.parametrize(
    "transport", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"]
)
def test_an_agent_calls_its_tool(server, has_run, transport) -> None:
    asked: list[str] = []

    @function_tool
    def weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    agent = Agent(
        name="Forecaster",
        instructions="Answer briefly.",
        tools=[weather],
        model=transport(server.model, client),
        model_settings=ModelSettings(tool_choice="required", max_tokens=64, temperature=0),
    )
    done = Runner.run_sync(agent, "How is the weather in Rome?", max_turns=5)
    assert asked and done.final_output
    has_run("openai-agents", f"an agent with a tool, {transport.__name__}")
