"""The page's "Show me", and what it shows while a prompt is read."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvboost.runtime.devices import Cpu
from kvboost.serve.settings import ApiKey
from support.browser import OpenPage, answered, expect, rows, small_targets
from support.fake_engine import FakeEngine, FakeStream
from support.live_server import live_server
from support.tiny import make_engine, tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request

    from kvboost import KVBoost


@contextmanager
def tiny_engine(**options: Any) -> Iterator[KVBoost]:
    model = tiny_model("llama", max_position_embeddings=8192)
    with make_engine(model, chunk_size=128, reuse_moved="always", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with tiny_engine() as engine, live_server(engine) as server:
        yield f"{server.url}/"


def sent_by(page: Page) -> list[dict[str, Any]]:
    """The chat requests that the page sends from now on."""
    sent: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            sent.append(request.post_data_json)

    page.on("request", keep)
    return sent


def texts(request: dict[str, Any]) -> list[str]:
    """The documents of a request, in their order; the question follows them."""
    return str(request["messages"][0]["content"]).split("\n\n")[:-1]


def test_show_me_asks_shuffles_and_asks_again(open_page: OpenPage) -> None:
    page = open_page()
    sent = sent_by(page)
    page.get_by_role("button", name="Show me").click()
    answered(page)
    first, second = sent
    assert texts(first) != texts(second) and sorted(texts(first)) == sorted(texts(second))
    assert len(texts(first)) == 4 and first["cache_salt"] == second["cache_salt"]

    turn = page.locator(".turn")
    assert turn.locator(".answer").count() == turn.locator(".time:visible").count() == 2
    orders = [line.split(" · ") for line in turn.locator(".texts").all_inner_texts()]
    assert orders == [[text.split("\n")[0] for text in texts(one)] for one in sent]
    expect(page.locator(".verdict")).to_have_text(
        re.compile(
            r"^\d+ % of the prompt was reused[:,.] .*\d+ m?s.*\d+ m?s.*"
            r"(The answers are the same\.|The answers differ after .*, and so can moved text\.)$"
        )
    )
    expect(page.locator(".first .line")).to_have_count(2)
    found = rows(page)
    assert found["moved"] > found["computed again"] > 0
    assert page.locator(".strip .recomputed").count() > 0

    healing = page.locator(".healing")
    expect(healing).to_contain_text(re.compile(r"^Made exact since.*: ([\d,]+) of \1 approximate"))
    expect(healing).to_contain_text(re.compile(r"chooses the same at .* tokens \(mean KL \d"))
    moved = page.locator(".prompt .span.moved")
    assert moved.count() == page.locator(".prompt .span.moved.healed").count() > 0
    expect(page.get_by_role("button", name="healed")).to_be_visible()
    gauge = page.get_by_role("figure", name="Healing and audit")
    expect(gauge).to_contain_text("KL from exact answers")

    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert small_targets(page) == []
    page.get_by_role("button", name=re.compile("^Next: ask something else")).click()
    answered(page)
    assert len(sent) == 3 and sent[2]["cache_salt"] == first["cache_salt"]
    assert sent[2]["messages"][:1] == second["messages"]
    assert rows(page)["exact"] > 3000
    expect(page.get_by_label("Your question")).to_be_in_viewport(ratio=1)
    page.reload()
    assert page.locator(".turn").first.locator(".answer").count() == 2
    expect(page.locator(".verdict").first).not_to_be_empty()

    page.get_by_role("button", name="Show me").click()
    answered(page)
    assert sent[3]["cache_salt"] != first["cache_salt"]  # the texts are new again


class Scripted(FakeEngine):
    """Gives the answers of ``script``, one after the other. None among the pieces of one hangs."""

    script: Sequence[Sequence[Any]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.taken = threading.Semaphore(0)

    def astream(self, *args: Any, **options: Any) -> FakeStream:
        self.pieces, *self.script = self.script
        self.taken.release()
        return super().astream(*args, **options)

    def wait_for(self, requests: int) -> None:
        """Waits until as many further requests have come. A page that cancels one at once may
        do so before the server has read it."""
        for _ in range(requests):
            assert self.taken.acquire(timeout=60)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    engine = Scripted()
    engine.context_length = None
    with live_server(engine) as server:
        yield engine, f"{server.url}/"


def test_show_me_can_be_stopped_and_leaves_a_conversation(
    scripted: tuple[Scripted, str], open_page: OpenPage
) -> None:
    engine, url = scripted
    page = open_page(url)
    sent = sent_by(page)
    engine.script = [[None]]
    page.get_by_role("button", name="Show me").click()
    engine.wait_for(1)
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_role("button", name="Show me")).to_be_focused()

    engine.script = [["In 1902."], [None], ["Alma."]]
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("2 of 2")
    expect(page.locator(".reading")).to_contain_text("Reading the prompt")
    engine.wait_for(2)
    page.keyboard.press("Escape")
    answered(page)
    expect(page.locator(".answer")).to_have_text("In 1902.")
    expect(page.get_by_label("Documents")).to_have_value("\n\n".join(texts(sent[1])))
    page.get_by_label("Your question").fill("And the ferry?")
    page.get_by_label("Your question").press("Enter")
    answered(page)
    assert [one["role"] for one in sent[3]["messages"]] == ["user", "assistant", "user"]
    assert sent[3]["messages"][0] == sent[1]["messages"][0]


def test_show_me_asks_for_the_key_first(open_page: OpenPage) -> None:
    engine = Scripted()
    engine.context_length = None
    engine.script = [["In 1902."], ["In 1902."]]
    keys = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))
    with live_server(engine, keys=keys) as server:
        page = open_page(f"{server.url}/", allowed="401|403")
        show, note = page.get_by_role("button", name="Show me"), page.locator("#show-locked")
        expect(note).to_contain_text("needs an API key first")
        show.click()
        field = page.get_by_label("API key")
        expect(field).to_be_focused()
        field.fill("k–ann")
        field.press("Enter")
        expect(page.locator("#key-note")).to_contain_text("visible ASCII")
        field.fill("k-ann")  # not an administrator's: there is no live view, but answers
        field.press("Enter")
        expect(page.locator("#connection")).to_have_text("needs an administrator's key")
        expect(note).to_be_hidden()
        show.click()
        answered(page)
        assert page.locator(".answer").all_inner_texts() == ["In 1902.", "In 1902."]
        page.context.close()


class Pace:
    """Lets an engine take one step at a time."""

    def __init__(self, engine: KVBoost) -> None:
        self._engine = engine
        self._ticks, self._stopped, self._over = threading.Semaphore(0), threading.Event(), False
        engine.between_steps(self._wait)
        assert self._stopped.wait(60)

    def _wait(self) -> None:
        self._stopped.set()
        self._ticks.acquire()
        if not self._over:
            self._engine.between_steps(self._wait)

    def step(self) -> None:
        self._stopped.clear()
        self._ticks.release()
        assert self._stopped.wait(60)

    def end(self) -> None:
        self._over = True
        self._ticks.release()


def test_the_page_says_how_far_a_prompt_is_and_cancels_it(
    open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cpu, "step_rows", 64)
    with tiny_engine() as engine, live_server(engine) as server:
        page = open_page(f"{server.url}/")
        expect(page.locator("#connection")).to_have_text("live")
        pace = Pace(engine)
        page.get_by_label("Your question").fill("Why? " * 400)
        page.get_by_label("Your question").press("Enter")
        reading = page.locator(".reading")
        expect(reading).to_contain_text(re.compile(r"^Reading the prompt.*[1-9]\d* s so far", re.S))
        bar = reading.get_by_role("progressbar")
        expect(bar).to_be_hidden()  # nothing has been counted
        for _ in range(3):
            pace.step()
        expect(reading).to_contain_text(
            re.compile(r"^Reading the prompt: (256|512|768) of 2,\d{3} tokens")
        )
        expect(bar).to_be_visible()
        assert 0 < bar.evaluate("node => node.value / node.max") < 1
        reading.get_by_role("button", name="Cancel").click()
        expect(page.locator("#status")).to_have_text("Stopped.")
        expect(page.get_by_label("Your question")).to_have_value("Why? " * 400)
        expect(page.locator(".turn")).to_have_count(0)
        pace.end()
        queue = page.get_by_role("figure", name="Queue").get_by_role("img")
        expect(queue).to_have_attribute("aria-label", re.compile(r"^0 of \d+ running"))
        page.context.close()
