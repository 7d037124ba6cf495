"""The page at ``/``, in a real browser, against a real server over a tiny model."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from browser import MISSING, faint_texts, unnamed_controls
from tiny import make_engine, tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Page, Request, Route

if MISSING:
    pytest.skip(MISSING, allow_module_level=True)

from playwright.sync_api import expect

from kvboost.serve.settings import ApiKey
from live_server import live_server

expect.set_options(timeout=60_000)  # for a busy machine
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


def ask(
    page: Page,
    documents: str,
    question: str = "Why?",
    *,
    max_tokens: int = 8,
    button: str = "Ask",
    continues: bool = False,
) -> None:
    if not continues:
        page.get_by_role("button", name="New", exact=True).click()
    page.get_by_label("Documents").fill(documents)
    page.get_by_label("Question", exact=True).fill(question)
    page.get_by_label("Max tokens").fill(str(max_tokens))
    page.get_by_role("button", name=button, exact=True).click()
    answered(page)


def answered(page: Page) -> None:
    expect(page.locator("#stop")).to_have_attribute("aria-disabled", "true")
    expect(page.locator(".turn .meta").last).to_be_attached()


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


def test_a_second_question_reuses_the_first_and_its_answer(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("a"), "First?")
    assert page.locator(".answer").inner_text()
    total = int(page.get_by_text(re.compile(r"^Prompt, \d+ rows$")).inner_text().split()[1])
    assert rows(page) == {"computed": total}

    ask(page, text_of("a"), "Other?", continues=True)
    assert page.locator(".turn").count() == 2
    found = rows(page)
    assert found["exact"] >= total and set(found) == {"exact", "computed"}
    expect(page.locator(".first")).to_contain_text("this request")
    shown = "".join(
        span.evaluate("node => node.lastChild.data") for span in page.locator(".prompt .span").all()
    )
    assert text_of("a") in shown and "First?" in shown and "Other?" in shown

    spans, detail = page.locator(".prompt").get_by_role("option"), page.locator(".detail")
    spans.first.focus()
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


def test_moved_text_is_shown_and_turns_exact_while_the_server_is_idle(open_page: OpenPage) -> None:
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

    healing = page.locator(".healing").last
    expect(healing).to_contain_text(re.compile(r"^Healed: ([\d,]+) of \1 approximate rows"))
    expect(healing).to_contain_text(re.compile(r"Audit: .* tokens, mean KL \d"))
    moved = page.locator(".prompt .span.moved")
    assert moved.count() == page.locator(".prompt .span.moved.healed").count() > 0
    gauge = page.get_by_role("figure", name="Healing and audit")
    expect(gauge).to_contain_text("1 answer audited")
    expect(gauge).to_contain_text("KL from exact answers")


def test_a_comparison_sends_the_same_request_with_and_without_reuse(open_page: OpenPage) -> None:
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    sent: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            sent.append(request.post_data_json)

    page.on("request", keep)
    ask(page, text_of("m"), 'It\'s "so"?\n\\ $HOME')
    ask(page, text_of("m"), "Why?", button="Compare")
    assert [one["kvboost"].pop("mode") for one in sent[1:]] == ["chunk_kv_reuse", "baseline"]
    assert sent[1] == sent[2]
    assert page.locator(".turn").last.locator(".answer").count() == 2
    expect(page.locator(".verdict").last).to_have_text(
        re.compile(
            r"server: .* ms against .*; seen here: .* ms against .* The answers are the same"
        )
    )
    expect(page.locator(".first")).to_contain_text("measured")
    assert page.locator(".first .line").count() == 4

    page.get_by_text("No reuse").click()
    ask(page, text_of("m"), 'It\'s "so"?\n\\ $HOME')
    assert set(rows(page)) == {"computed"}
    for button, read in (("Copy as curl", curl_body), ("Copy as Python", python_body)):
        page.get_by_role("button", name=button).last.click()
        expect(page.get_by_role("button", name="Copied").last).to_be_visible()
        assert read(page.evaluate("navigator.clipboard.readText()"), page.url) == sent[-1]

    page.get_by_text("Exact only").click()
    page.get_by_label("Question", exact=True).fill("And then?")
    page.get_by_role("button", name="Plan only").click()
    expect(page.locator(".first")).to_contain_text("a plan: nothing was run")
    assert rows(page)["exact"] > 500 and len(sent) == 4


def curl_body(command: str, address: str) -> Any:
    words = shlex.split(command)
    assert words[:3] == ["curl", "-sN", f"{address}v1/chat/completions"]
    return json.loads(words[words.index("-d") + 1])


def python_body(program: str, address: str) -> Any:
    """The arguments of the one call that has many."""
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    client = next(call for call in calls if ast.unparse(call.func) == "OpenAI")
    assert ast.literal_eval(client.keywords[0].value) == f"{address}v1"
    create = next(call for call in calls if ast.unparse(call.func).endswith(".create"))
    given = {str(word.arg): ast.literal_eval(word.value) for word in create.keywords}
    return given.pop("extra_body") | given


def test_conversations_survive_a_reload_until_they_are_cleared(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("h"), "First?")
    ask(page, "", "Second?")
    page.reload()
    assert page.locator(".asked").all_inner_texts() == ["Second?"]
    expect(page.get_by_label("Documents")).to_have_value("")
    page.locator("#conversations").select_option("First?")
    assert page.locator(".asked").all_inner_texts() == ["First?"]
    expect(page.get_by_label("Documents")).to_have_value(text_of("h"))
    assert sum(rows(page).values()) > 500

    page.get_by_role("button", name="Clear history").click()
    page.get_by_role("button", name="Clear them").click()
    assert page.locator(".turn").count() == 0
    assert page.evaluate("JSON.stringify(localStorage)") == "{}"


def test_an_answer_can_be_stopped(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_label("Question", exact=True).fill("Say much.")
    page.get_by_label("Max tokens").fill("8000")
    page.get_by_label("Question", exact=True).press("Control+Enter")
    expect(page.locator(".answer[aria-busy=true]:not(:has(.waiting))")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".reply .meta")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    queue = page.get_by_role("figure", name="Queue").get_by_role("img")
    expect(queue).to_have_attribute("aria-label", re.compile(r"^0 of \d+ running"))


def test_an_error_of_the_server_is_shown(open_page: OpenPage) -> None:
    page = open_page(allowed="400")
    page.get_by_label("Documents").fill("x" * 10_000)
    page.get_by_label("Question", exact=True).fill("Why?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("8,192")
    expect(page.get_by_label("Question", exact=True)).to_have_value("Why?")
    assert page.locator(".turn").count() == 0


def test_charts_follow_the_requests_and_begin_anew_after_a_restart(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("c"))
    ask(page, text_of("c"))
    first = page.get_by_role("figure", name="Latency")
    sources = page.get_by_role("figure", name="Prompt rows by source")
    expect(first.locator("circle").nth(1)).to_be_visible()
    expect(first).to_contain_text("median")
    expect(sources.locator("rect.exact").last).to_be_visible()
    expect(first.locator("circle.ring").nth(1)).to_be_visible()
    expect(page.get_by_role("figure", name="Memory by tier")).to_contain_text(" of 2.0 GiB")
    facts = page.get_by_role("figure", name="Model and machine")
    for fact in ("LlamaForCausalLM", "float32 · 3 layers", "8,192 tokens", "ram 2.0 GiB"):
        expect(facts).to_contain_text(fact)

    summary = re.compile(r"^\d+ % reused$")  # the last request may still be on its way
    expect(sources.locator(".note")).to_have_text(summary)
    first.get_by_role("slider").focus()
    page.keyboard.press("ArrowLeft")
    expect(first.locator(".note")).to_have_text(re.compile(r"^\d\d:\d\d:\d\d first token .* ms"))
    expect(sources.locator(".note")).to_have_text(re.compile("^exact "))
    page.keyboard.press("Tab")
    expect(sources.locator(".note")).to_have_text(summary)

    def fresh(route: Route) -> None:
        live = route.fetch().json()
        live |= {"seq": 0, "requests": [], "uptime_s": 1.0, "now": live["now"] + 60}
        route.fulfill(json=live)

    with page.expect_request(lambda request: request.url.endswith("live?since=0")):
        page.route("**/kvboost/live*", fresh)
    expect(page.get_by_role("figure", name="Latency")).to_contain_text("no request yet")
    page.unroute_all(behavior="wait")


def test_the_page_pauses_while_it_or_the_server_is_away(open_page: OpenPage) -> None:
    page = open_page(allowed="ERR_FAILED")
    state = page.locator("#connection")
    expect(state).to_have_text("live")
    page.route("**/kvboost/live*", lambda route: route.abort())
    expect(state).to_have_text("server unreachable, trying again")
    page.unroute("**/kvboost/live*")
    expect(state).to_have_text("live")

    hide = """hidden => {
      Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    page.evaluate(hide, True)
    expect(state).to_have_text("paused")
    page.evaluate(hide, False)
    expect(state).to_have_text("live")


def test_a_text_with_markup_stays_text_and_is_forgotten_when_that_is_confirmed(
    fresh_address: str, open_page: OpenPage
) -> None:
    page = open_page(fresh_address)
    markup = "<img src=x onerror=alert(1)><b>bold</b>"
    ask(page, markup + text_of("f"))
    expect(page.locator("#chunks")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator(".prompt")).to_contain_text("<b>bold</b>")
    assert page.locator("img").count() == 0
    preview = page.locator("#chunks tr", has_text="<b>bold</b>")
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
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_label("Question", exact=True).fill("Why?")
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
        page.reload()
        expect(page.locator(".asked")).to_have_text("Why?")
        assert page.evaluate("JSON.stringify(localStorage)") == "{}"
        assert page.evaluate("document.cookie") == ""
        assert KEY in page.evaluate("JSON.stringify(sessionStorage)")
        page.get_by_role("button", name="Remove key").click()
        expect(page.locator("#connection")).to_have_text("needs a key")
        assert page.evaluate("JSON.stringify(sessionStorage)") == "{}"
        assert page.locator(".turn").count() == 0
        page.context.close()


def test_the_page_fits_and_is_readable_in_light_and_dark(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 800})
    expect(page.locator("#connection")).to_have_text("live")
    assert page.locator(".context details[open]").count() == 0
    page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    assert faint_texts(page) == []
    ask(page, text_of("l"))
    ask(page, text_of("l"), button="Compare", continues=True)
    expect(page.locator("#chunks tr").first).to_be_visible()
    for width in (360, 800, 1280):
        page.set_viewport_size({"width": width, "height": 800})
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
