"""The last prompts on the page: a row each, with the edit that broke the prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from support.browser import OpenPage, expect, faint_texts, small_targets, unnamed_controls
from support.live_server import live_server
from support.tiny import make_engine, tiny_model

SYSTEM = "You are an agent.\nIt is 10:21.\nRead before you write, and test after it.\n"
FILE = "def answer():\n    return 42\n" * 6


@pytest.fixture
def address() -> Iterator[str]:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model, reuse_moved="always") as engine, live_server(engine) as server:
        yield f"{server.url}/"


def send(address: str, system: str, question: str) -> None:
    said = [{"role": "system", "content": system}, {"role": "user", "content": FILE + question}]
    body = {"model": "custom", "messages": said, "max_tokens": 2}
    assert httpx.post(f"{address}v1/chat/completions", json=body, timeout=120).is_success


def test_a_changed_line_is_shown_where_the_map_breaks(address: str, open_page: OpenPage) -> None:
    page = open_page()
    rows = page.locator("#requests-list details")
    expect(page.locator("#requests-list")).to_have_text("Nothing has been asked yet.")
    send(address, SYSTEM, "What is it?")
    send(address, SYSTEM.replace("10:21", "11:45"), "What is <b>it</b>?")
    expect(rows).to_have_count(2)  # the live view tells the page
    first, second = rows.all()
    expect(first.locator(".edit")).to_have_text("No known text begins like this.")
    expect(second.locator(".edit")).to_have_text("▼ line 2 It is 10:21 1:45.")
    expect(second.locator(".edit del")).to_have_text("0:21")
    expect(second.locator("summary")).to_contain_text(re.compile(r"\d+ % reused"))
    kinds = [
        re.findall(r"exact|moved|compute$", one.get_attribute("class") or "")
        for one in second.locator(".bar.map > .fill").all()
    ]
    assert kinds == [["exact"], ["compute"], ["moved"], ["compute"]]
    mark, new = (
        second.locator(one).bounding_box() for one in (".edit-mark", ".fill.compute >> nth=0")
    )
    assert abs(mark["x"] + mark["width"] / 2 - new["x"]) < 2

    second.locator("summary").click()
    expect(second.locator(".side").first).to_have_text("cachedIt is 10:21.")
    expect(second.locator(".side").last).to_have_text("promptIt is 11:45.")
    expect(second.locator(".request-parts li").nth(1)).to_contain_text("4 tokensnew text")
    expect(second.locator(".request-parts")).to_contain_text("<b>it</b>")  # text, not markup
    send(address, SYSTEM, "And now?")
    expect(rows).to_have_count(3)
    expect(page.locator("#requests-list details[open]")).to_have_count(1)  # it stays open
    assert faint_texts(page) == [] and unnamed_controls(page) == []


def test_rows_fit_a_phone(address: str, open_page: OpenPage) -> None:
    send(address, SYSTEM, "What is it?")
    page = open_page(viewport={"width": 360, "height": 800}, has_touch=True, is_mobile=True)
    expect(page.locator("#requests-list details")).to_have_count(1)
    page.locator("#requests-list summary").tap()
    expect(page.locator(".request-parts li").first).to_contain_text("new text")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert [one for one in small_targets(page) if "details" in one or "requests" in one] == []
