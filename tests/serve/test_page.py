"""The page at ``/``, in a real browser, against a real server over a tiny model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from browser import MISSING, faint_texts, open_browser, unnamed_controls
from tiny import make_engine, tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from playwright.sync_api import expect

from kvboost.serve.settings import ApiKey
from live_server import live_server

expect.set_options(timeout=15_000)  # for a busy machine
KEY = "a-key-of-the-test"
OpenPage = Callable[..., "Page"]


@contextmanager
def serving(**settings: Any) -> Iterator[str]:
    model = tiny_model("llama", max_position_embeddings=8192)
    with (
        make_engine(model, chunk_size=128, reuse_moved="always") as engine,
        live_server(engine, **settings) as server,
    ):
        yield f"{server.url}/"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as url:
        yield url


@pytest.fixture
def fresh_address() -> Iterator[str]:
    """A server with an empty cache."""
    with serving() as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[OpenPage]:
    """Opens the page. Whatever the browser complains of fails the test, except what ``allowed``
    matches; so does anything that is fetched from elsewhere."""
    complaints: list[str] = []

    with ExitStack() as stack:

        def open_page(url: str = address, allowed: str = "^$", **context: object) -> Page:
            page = browser.new_context(**context).new_page()
            stack.callback(page.context.close)
            page.set_default_timeout(10_000)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "console",
                lambda said: (
                    complaints.append(said.text)
                    if said.type in ("error", "warning") and not re.search(allowed, said.text)
                    else None
                ),
            )
            page.on(
                "request",
                lambda request: (
                    None if request.url.startswith(url) else complaints.append(request.url)
                ),
            )
            page.goto(url)
            return page

        yield open_page
    assert complaints == []


def ask(page: Page, documents: str, question: str = "Why?", *, max_tokens: int = 8) -> None:
    page.get_by_label("Documents").fill(documents)
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name="Ask", exact=True).click()
    answered(page)


def answered(page: Page) -> None:
    expect(page.locator("#answer-meta")).to_contain_text("whole request")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")


def rows(page: Page) -> dict[str, int]:
    """What the legend of the last report says."""
    shown = page.locator("#report .legend li").all()
    return {
        line.locator("b").inner_text(): int(line.locator(".amount").inner_text().replace(",", ""))
        for line in shown
    }


def text_of(seed: str, length: int = 600) -> str:
    words = [f"{seed}{number * 7919 % 997}" for number in range(length // 5)]
    return " ".join(words)[:length].strip()


def test_the_second_question_about_a_text_reuses_it_exactly(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("a"), "First?")
    assert page.locator("#answer").inner_text()
    total = int(page.get_by_text(re.compile(r"^Prompt, \d+ rows$")).inner_text().split()[1])
    assert rows(page) == {"computed": total}

    ask(page, text_of("a"), "Other?")
    found = rows(page)
    assert sum(found.values()) == total
    assert found["exact"] > 500
    expect(page.locator(".first")).to_contain_text("this request")
    shown = "".join(
        span.evaluate("node => node.lastChild.data") for span in page.locator(".prompt .span").all()
    )
    assert text_of("a") in shown and "Other?" in shown


def test_three_clicks_on_an_example_show_moved_text(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_role("button", name="Texts in another order").click()
    page.get_by_label("Max tokens").fill("4")
    before = page.get_by_label("Documents").input_value()
    page.get_by_role("button", name="Ask", exact=True).click()
    answered(page)
    page.get_by_role("button", name=re.compile("^Next: put the texts")).click()
    answered(page)
    after = page.get_by_label("Documents").input_value()
    assert after != before and sorted(after.split("\n\n")) == sorted(before.split("\n\n"))
    found = rows(page)
    assert found["moved"] > found["computed again"] > 0
    assert page.locator(".strip .recomputed").count() > 0


def test_arrow_keys_move_between_spans(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("k"))
    ask(page, text_of("k"))
    spans = page.get_by_role("option")
    assert spans.count() > 3
    spans.first.focus()
    detail = page.locator(".detail")
    expect(detail).to_contain_text("rows 0 to 127")
    expect(detail).to_contain_text(re.compile("donor [0-9a-f]{12} · from ram"))
    page.keyboard.press("ArrowRight")
    expect(spans.nth(1)).to_be_focused()
    expect(spans.nth(1)).to_have_attribute("aria-selected", "true")
    expect(detail).to_contain_text("rows 128 to 255")
    page.keyboard.press("End")
    expect(detail).to_contain_text("computed")
    spans.nth(1).hover()
    expect(detail).to_contain_text("rows 128 to 255")


def test_a_mode_without_reuse_reuses_nothing(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("m"))
    page.get_by_text("No reuse").click()
    ask(page, text_of("m"))
    assert set(rows(page)) == {"computed"}


def test_a_plan_runs_nothing(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("p"))
    page.get_by_role("button", name="Plan only").click()
    expect(page.locator(".first")).to_contain_text("a plan: nothing was run")
    assert rows(page)["exact"] > 500
    expect(page.locator("#answer")).to_be_empty()


def test_an_answer_can_be_stopped(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_label("Question", exact=True).fill("Say much.")
    page.get_by_label("Max tokens").fill("8000")
    page.get_by_label("Question", exact=True).press("Control+Enter")
    expect(page.locator("#answer")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#answer-meta")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    queue = page.get_by_role("figure", name="Queue").get_by_role("img")
    expect(queue).to_have_attribute("aria-label", re.compile(r"^0 of \d+ running"))


def test_an_error_of_the_server_is_shown(open_page: OpenPage) -> None:
    page = open_page(allowed="400")
    page.get_by_label("Documents").fill("x" * 10_000)
    page.get_by_label("Question", exact=True).fill("Why?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("8,192")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()


def test_charts_follow_the_requests(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("c"))
    ask(page, text_of("c"))
    first = page.get_by_role("figure", name="First token")
    sources = page.get_by_role("figure", name="Prompt rows by source")
    expect(first.locator("circle").nth(1)).to_be_visible()
    expect(first).to_contain_text("median")
    expect(sources.locator("rect.exact").last).to_be_visible()
    expect(page.get_by_role("figure", name="Memory by tier")).to_contain_text(" of 2.0 GiB")

    summary = re.compile(r"^\d+ % not read again$")  # the last request may still be on its way
    expect(sources.locator(".note")).to_have_text(summary)
    first.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    expect(first.locator(".note")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d .* ms"))
    expect(sources.locator(".note")).to_have_text(re.compile("^exact "))
    page.keyboard.press("Tab")
    expect(sources.locator(".note")).to_have_text(summary)


def test_the_page_notices_that_the_server_is_away_and_back(open_page: OpenPage) -> None:
    page = open_page(allowed="ERR_FAILED")
    state = page.locator("#connection")
    expect(state).to_have_text("live")
    page.route("**/kvboost/live*", lambda route: route.abort())
    expect(state).to_have_text("server unreachable, trying again")
    page.unroute("**/kvboost/live*")
    expect(state).to_have_text("live")


def test_after_a_restart_the_page_starts_from_the_beginning(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, "Something.")
    expect(page.locator("circle").first).to_be_visible()

    def fresh(route: Route) -> None:
        live = route.fetch().json()
        live |= {"seq": 0, "requests": [], "uptime_s": 1.0, "now": live["now"] + 60}
        route.fulfill(json=live)

    with page.expect_request(lambda request: request.url.endswith("live?since=0")):
        page.route("**/kvboost/live*", fresh)
    expect(page.get_by_role("figure", name="First token")).to_contain_text("no request yet")
    page.unroute_all(behavior="wait")


def test_a_hidden_tab_sends_no_requests(open_page: OpenPage) -> None:
    page = open_page()
    state = page.locator("#connection")
    expect(state).to_have_text("live")
    hide = """hidden => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    expect(state).to_have_text("paused")
    page.evaluate(hide, False)
    expect(state).to_have_text("live")


def test_markup_in_a_prompt_stays_text(fresh_address: str, open_page: OpenPage) -> None:
    page = open_page(fresh_address)
    markup = "<img src=x onerror=alert(1)><b>bold</b>" + text_of("x", 200)
    ask(page, markup)
    page.get_by_role("button", name="Refresh").click()
    expect(page.locator("#chunks")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator(".prompt")).to_contain_text("<b>bold</b>")
    assert page.locator("img").count() == 0


def test_a_text_is_forgotten_only_when_that_is_confirmed(
    fresh_address: str, open_page: OpenPage
) -> None:
    page = open_page(fresh_address)
    ask(page, text_of("f"))
    preview = page.locator("#chunks tr", has_text=text_of("f")[:40])
    expect(preview.first).to_be_visible()

    page.get_by_label("Forget a text").fill(text_of("f"))
    page.get_by_role("button", name="Forget", exact=True).click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("cannot be undone")
    expect(dialog.get_by_role("button", name="Keep it")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(preview.first).to_be_visible()

    page.get_by_role("button", name="Forget", exact=True).click()
    dialog.get_by_role("button", name="Forget it").click()
    expect(page.locator("#forget-status")).to_have_text(re.compile(r"\d+ chunks? forgotten\."))
    expect(preview).to_have_count(0)
    page.get_by_role("button", name="Plan only").click()
    expect(page.locator(".first")).to_contain_text("a plan")
    assert rows(page).get("exact", 0) < 128


def test_a_key_is_asked_for_and_kept_for_the_session(open_page: OpenPage) -> None:
    with serving(keys=(ApiKey("operator", KEY, is_admin=True),)) as url:
        page = open_page(url, allowed="401")
        field = page.get_by_label("API key")
        expect(field).to_be_visible()
        expect(page.locator("#connection")).to_have_text("needs a key")
        field.fill("wrong")
        page.get_by_role("button", name="Use key").click()
        expect(page.locator("#key-note")).not_to_be_empty()
        field.fill(KEY)
        field.press("Enter")
        expect(page.locator("#connection")).to_have_text("live")
        ask(page, "Something.")
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert page.evaluate("document.cookie") == ""
        assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
        page.get_by_role("button", name="Remove key").click()
        expect(page.locator("#connection")).to_have_text("needs a key")
        assert page.evaluate("JSON.stringify(sessionStorage)") == "{}"
        page.context.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_and_is_readable_in_light_and_dark(open_page: OpenPage, width: int) -> None:
    page = open_page(viewport={"width": width, "height": 800})
    expect(page.locator("#connection")).to_have_text("live")
    assert faint_texts(page) == []
    ask(page, text_of("l"))
    ask(page, text_of("l"))
    expect(page.locator("#chunks tr").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert unnamed_controls(page) == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert faint_texts(page) == []


def test_the_first_key_stop_is_a_skip_link(open_page: OpenPage) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the playground")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    first = page.get_by_role("button", name="A text, asked twice")
    expect(first).to_be_focused()
    assert first.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_focused()
