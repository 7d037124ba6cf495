"""LiteLLM."""

from __future__ import annotations

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "Say something."}]


@pytest.mark.parametrize("route", ["openai", "hosted_vllm"])
def test_both_routes_answer(server, has_run, route) -> None:
    given = {
        "model": f"{route}/{server.model}",
        "api_base": server.url,
        "api_key": "none",
        "messages": MESSAGES,
        "max_tokens": 8,
        "timeout": 300,
    }
    assert litellm.completion(**given).choices[0].message.content
    pieces = litellm.completion(**given, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces)
    has_run("litellm", f"`{route}/`, streaming")


def test_context_overflow_has_its_own_error(server, has_run) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=f"openai/{server.model}",
            api_base=server.url,
            api_key="none",
            messages=[{"role": "user", "content": "word " * 200_000}],
            num_retries=0,
        )
    has_run("litellm", "`ContextWindowExceededError`")
