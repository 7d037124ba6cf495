"""Instructor."""

from __future__ import annotations

import instructor
import openai
import pytest

from support.questions import Verdict


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor_fills_a_model(server, has_run, mode) -> None:
    client = openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    found = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Think of an animal."}],
        response_model=Verdict,
        max_tokens=64,
        max_retries=0,
    )
    assert isinstance(found, Verdict)
    has_run("instructor", f"`{mode}`")
