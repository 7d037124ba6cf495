"""What the page makes of answers: Markdown, calls of tools, and formats that are refused. The
answers are those of an engine without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.browser import (
    OpenPage,
    ask_alone,
    expect,
    faint_texts,
    open_settings,
    small_targets,
    unnamed_controls,
)
from support.fake_engine import FakeEngine

MARKDOWN = """# A title

Some **bold**, *slanted* and `code`, [a page](https://example.org/a_b_c), [no](javascript:alert(1)).
A second line with 2 * 3 * 4 and snake_case_names.

1. one
2. two
   - inner **point**

   more of two

> quoted

| a | b |
| --- | --- |
| 1 | <i>2</i> |

<img src=x onerror=alert(1)><script>alert(2)</script>

```python
def f(x):
    return x < 1  # **not bold**
```
![picture](https://example.org/x.png)

```
open"""


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    fake = FakeEngine()
    fake.context_length = None
    return fake


def test_answers_are_markdown_and_never_html(engine: FakeEngine, open_page: OpenPage) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    engine.pieces = [MARKDOWN[at : at + 7] for at in range(0, len(MARKDOWN), 7)]
    answer = ask_alone(page).locator(".answer")
    expect(answer.locator("h4")).to_have_text("A title")
    assert answer.locator("strong").all_inner_texts() == ["bold", "point"]
    assert answer.locator("em").all_inner_texts() == ["slanted"]
    assert answer.locator("p code").all_inner_texts() == ["code"]
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert links == ["https://example.org/a_b_c", "https://example.org/x.png"]
    expect(answer).to_contain_text("a page (example.org)")
    expect(answer).to_contain_text("no (javascript:alert(1))")
    expect(answer).to_contain_text("2 * 3 * 4 and snake_case_names")
    assert answer.locator("ol > li").count() == 2
    expect(answer.locator("ol > li ul li")).to_have_text("inner point")
    expect(answer.locator("ol > li").nth(1)).to_contain_text("more of two")
    expect(answer.locator("blockquote")).to_have_text("quoted")
    assert answer.locator("td").all_inner_texts() == ["1", "<i>2</i>"]
    expect(answer).to_contain_text("<img src=x onerror=alert(1)><script>alert(2)</script>")
    expect(page.locator("img, main script, .answer i")).to_have_count(0)

    blocks = answer.locator("pre").all_inner_texts()
    assert blocks == ["def f(x):\n    return x < 1  # **not bold**", "open"]
    answer.get_by_role("button", name="Copy").first.click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == blocks[0]
    assert faint_texts(page) == [] and unnamed_controls(page) == []


def test_tools_are_called_and_their_results_sent(engine: FakeEngine, open_page: OpenPage) -> None:
    page = open_page(allowed="400", viewport={"width": 390, "height": 844})
    open_settings(page)
    page.get_by_text("JSON schema and tools").click()
    engine.conversations.clear()
    tools, problem = page.get_by_label("Tools a list"), page.locator("#tools-error")
    tools.fill('[{"type": "function"')
    ask_alone(page)
    expect(problem).to_contain_text("Not JSON: ")
    expect(tools).to_have_attribute("aria-invalid", "true")
    tools.fill("{}")
    ask_alone(page)
    expect(problem).to_contain_text("tools are a list")
    tools.fill('[{"type": "function", "function": {"name": "two words"}}]')
    ask_alone(page)
    expect(problem).to_contain_text("name")
    expect(page.get_by_role("alert")).to_be_visible()
    page.get_by_label("JSON schema").fill('{"type": 3}')
    page.get_by_label("JSON schema").blur()
    assert page.locator(".turn").count() == 0 and engine.conversations == []

    page.get_by_label("JSON schema").fill("")
    page.get_by_role("button", name="Example tool").click()
    page.get_by_label("Calls of tools").select_option("required")
    call = json.dumps({"name": "weather", "arguments": {"city": "Oslo", "days": 2}})
    engine.pieces = ["I look. ", "<tool_call>", call, "</tool_call>"]
    turn = ask_alone(page, "Rain in Oslo?")
    expect(turn.locator(".call")).to_contain_text("calls weather")
    expect(turn.locator(".call pre")).to_have_text('{\n  "city": "Oslo",\n  "days": 2\n}')
    expect(turn.locator(".reply .meta")).to_contain_text("calls tools")
    assert engine.uses[-1].choice == "required"
    assert faint_texts(page) == [] and unnamed_controls(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert small_targets(page) == []

    engine.pieces = ["It ", "rains."]
    page.get_by_label("Result of weather").fill("rain, 8 degrees")
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".answer").last).to_have_text("It rains.")
    expect(page.locator(".asked").last).to_have_text("Result: rain, 8 degrees")
    said: list[Any] = list(engine.conversations[-1].messages)
    assert [message["role"] for message in said] == ["user", "assistant", "tool"]
    assert said[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo", "days": 2}
