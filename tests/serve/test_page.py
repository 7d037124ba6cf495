"""The page at ``/``, in a real browser, against a real server over a tiny model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvboost.serve.settings import ApiKey
from support.browser import (
    OpenPage,
    ask,
    ask_alone,
    expect,
    faint_texts,
    open_settings,
    rows,
    small_targets,
    unnamed_controls,
)
from support.live_server import live_server
from support.tiny import make_engine, tiny_model

if TYPE_CHECKING:
    from playwright.sync_api import Request, Route

KEY = "a-key-of-the-test"


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


def text_of(seed: str, length: int = 600) -> str:
    words = [f"{seed}{number * 7919 % 997}" for number in range(length // 5)]
    return " ".join(words)[:length].strip()


def test_a_second_question_reuses_the_first_and_its_answer(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("a"), "First?")
    assert page.locator(".answer").inner_text()
    total = int(page.get_by_text(re.compile(r"^Prompt, \d+ tokens$")).inner_text().split()[1])
    assert rows(page) == {"computed": total}

    ask(page, text_of("a"), "Other?", continues=True)
    expect(page.locator(".turn")).to_have_count(2)
    found = rows(page)
    assert found["exact"] >= total and set(found) == {"exact", "computed"}
    expect(page.locator(".first")).to_contain_text("this request")
    shown = "".join(
        span.evaluate("node => node.lastChild.data") for span in page.locator(".prompt .span").all()
    )
    assert text_of("a") in shown and "First?" in shown and "Other?" in shown

    spans, detail = page.locator(".prompt").get_by_role("option"), page.locator(".detail")
    spans.first.focus()
    expect(detail).to_contain_text("tokens 0 to 127")
    expect(detail).to_contain_text(re.compile("stored as [0-9a-f]{12} in ram"))
    page.keyboard.press("ArrowRight")
    expect(spans.nth(1)).to_be_focused()
    expect(spans.nth(1)).to_have_attribute("aria-selected", "true")
    expect(detail).to_contain_text("tokens 128 to 255")
    page.keyboard.press("End")
    expect(detail).to_contain_text("computed")
    spans.nth(1).hover()
    expect(detail).to_contain_text("tokens 128 to 255")


def test_a_comparison_sends_the_same_request_with_and_without_reuse(open_page: OpenPage) -> None:
    page = open_page()
    sent: list[dict[str, Any]] = []

    def keep(request: Request) -> None:
        if request.url.endswith("/chat/completions"):
            sent.append(request.post_data_json)

    page.on("request", keep)
    ask(page, text_of("m"), "So?")
    ask(page, text_of("m"), "Why?", button="Compare")
    assert [one["kvboost"].pop("mode") for one in sent[1:]] == ["chunk_kv_reuse", "baseline"]
    assert sent[1] == sent[2]
    assert page.locator(".turn").last.locator(".answer").count() == 2
    expect(page.locator(".verdict").last).to_have_text(
        re.compile(r"^\d+ % of the prompt was reused.* The answers are the same\.$")
    )
    assert page.locator(".turn").last.locator(".time b").all_inner_texts() != []
    expect(page.locator(".first .line")).to_have_count(4)

    page.get_by_text("None", exact=True).click()
    ask(page, text_of("m"), "So?")
    assert set(rows(page)) == {"computed"}
    expect(page.locator(".headline")).to_contain_text("Reuse was off")
    page.get_by_text("Same beginning", exact=True).click()
    page.get_by_label("Your question").fill("And then?")
    page.get_by_role("button", name="What is known?").click()
    expect(page.locator(".headline")).to_have_text(re.compile(r"^\d+ % of this prompt is known\."))
    assert rows(page)["exact"] > 500 and len(sent) == 4


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
    expect(page.locator(".turn")).to_have_count(0)
    assert page.evaluate("JSON.stringify(localStorage)") == "{}"


def test_an_answer_can_be_stopped(open_page: OpenPage) -> None:
    page = open_page()
    open_settings(page)
    page.get_by_label("Your question").fill("Say much.")
    page.get_by_label("Max tokens").fill("8000")
    page.get_by_label("Your question").press("Control+Enter")
    expect(page.locator(".answer[aria-busy=true]:not(:has(.reading))")).not_to_be_empty()
    expect(page.locator("#status")).to_have_text("Answering")
    page.get_by_role("button", name="Stop").press("Enter")  # it moves while the answer grows
    expect(page.locator("#status")).to_have_text("Stopped.")
    expect(page.locator(".reply .meta")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_enabled()
    queue = page.get_by_role("figure", name="Queue").get_by_role("img")
    expect(queue).to_have_attribute("aria-label", re.compile(r"^0 of \d+ running"))


def test_an_error_of_the_server_is_shown(open_page: OpenPage) -> None:
    page = open_page(allowed="400")
    open_settings(page)
    page.get_by_label("Documents").fill("x" * 10_000)
    page.get_by_label("Your question").fill("Why?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("8,192")
    expect(page.get_by_label("Your question")).to_have_value("Why?")
    expect(page.locator(".turn")).to_have_count(0)


def test_charts_follow_the_requests_and_begin_anew_after_a_restart(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("c"))
    ask(page, text_of("c"))
    first = page.get_by_role("figure", name="Latency")
    sources = page.get_by_role("figure", name="Prompt tokens by source")
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
    expect(page.locator("img")).to_have_count(0)
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
    page.get_by_label("Your question").fill("Why?")
    page.get_by_role("button", name="What is known?").click()
    expect(page.locator(".headline")).to_contain_text("Nothing was run.")
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
        expect(page.locator(".turn")).to_have_count(0)
        page.context.close()


def test_the_page_fits_and_is_readable_in_light_and_dark(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 800})
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("details[open]")).to_have_count(0)
    page.locator("details").evaluate_all("all => all.forEach((one) => { one.open = true; })")
    assert faint_texts(page) == [] and small_targets(page) == []
    ask(page, text_of("l"))
    ask(page, text_of("l"), button="Compare", continues=True)
    expect(page.locator("#chunks tr").first).to_be_visible()
    assert small_targets(page) == []
    for width in (360, 800, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert unnamed_controls(page) == []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert faint_texts(page) == []


def test_a_phone_shows_the_question_first_and_keeps_it_in_view(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 640}, has_touch=True)
    question, button = page.get_by_label("Your question"), page.locator("#ask")
    for part in (page.locator("#pitch"), page.locator("#show"), question, button):
        expect(part).to_be_in_viewport(ratio=1)
    settings = page.get_by_text("Documents and settings")
    assert button.bounding_box()["y"] < settings.bounding_box()["y"]
    ask(page, text_of("p", 3000), "Why?\n" * 40, max_tokens=64)
    page.get_by_text("Documents and settings").click()
    page.locator(".turn").scroll_into_view_if_needed()
    for part in (question, button):
        expect(part).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_a_phone_shows_the_buttons_of_the_last_answer(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 400, "height": 640})
    for question in ("Why?", "When?", "Who?"):
        ask_alone(page, question)
    expect(page.locator(".turn")).to_have_count(3)
    expect(page.locator(".turn").last.locator(".turn-actions button")).to_have_count(4)
    page.wait_for_function(
        """() => [...document.querySelectorAll(".turn:last-child .turn-actions button")].every(
          (node) => {
            const { left, bottom } = node.getBoundingClientRect();
            return document.elementFromPoint(left + 9, bottom - 3) === node;
          })"""
    )


def test_a_wrong_setting_is_shown_though_it_was_hidden(open_page: OpenPage) -> None:
    page = open_page()
    open_settings(page)
    page.get_by_label("Max tokens").fill("0")
    page.get_by_text("Documents and settings").click()
    page.get_by_label("Your question").fill("Why?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_label("Max tokens")).to_be_focused()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_first_key_stop_is_a_skip_link(open_page: OpenPage) -> None:
    page = open_page()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the question")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    for name in ("Show me", "Your question", "Ask"):
        page.keyboard.press("Tab")
        reached = page.get_by_label(name).or_(page.get_by_role("button", name=name, exact=True))
        expect(reached).to_be_focused()
        assert reached.evaluate("node => getComputedStyle(node).outlineStyle") == "solid"


def test_each_word_of_the_legend_is_explained(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator(".legend")).to_have_count(0)  # there is no prompt to explain yet
    ask(page, text_of("w"), "First?")
    ask(page, text_of("w"), "Other?", continues=True)
    word, said = page.get_by_role("button", name="exact"), page.locator(".says")
    expect(said).to_have_text("Point at a word to see what it means.")
    word.focus()
    expect(said).to_contain_text("follows the same text")
    expect(word).to_have_accessible_description(re.compile("follows the same text"))
    page.get_by_role("button", name="computed").hover()
    expect(said).to_have_text("New: the model had to read it.")


def test_little_reuse_is_called_little(open_page: OpenPage) -> None:
    page = open_page()
    ask(page, text_of("q", 300), "First?")
    ask(page, text_of("q", 300) + text_of("new", 3000), "Other?")
    expect(page.locator(".headline")).to_have_text(
        re.compile(r"^\d+ % of the prompt was known, so there was little to gain\.$")
    )
    assert 0 < rows(page)["exact"] < 400
    expect(page.locator("#report")).not_to_contain_text("sooner")


# The exact tokens of 1,000, the time to the first token and in the queue, the time without reuse.
GAINS = [
    (0, 500, 0, None, "Nothing of this prompt was known before."),
    (30, 500, 0, 800, "3 % of the prompt was known, so there was little to gain."),
    (800, 500, 0, None, "80 % of the prompt was reused."),
    (
        800,
        500,
        0,
        2500,
        "reused: the first token came 5.0 × sooner, after 500 ms instead of 2.5 s.",
    ),
    (800, 500, 0, 400, "reused, but the first token came no sooner: 500 ms, not 400 ms."),
    (800, 500, 300, 2500, "running, so the times (500 ms and 2.5 s) do not compare."),
]


def test_times_are_compared_only_if_much_was_reused_and_both_were_measured(
    open_page: OpenPage,
) -> None:
    page = open_page()
    for exact, ttft, queued, without, said in GAINS:
        known = {"exact_tokens": exact, "computed_tokens": 1000 - exact}
        none = {"approximate_tokens": 0, "moved_tokens": 0, "recomputed_tokens": 0}
        estimate = {"estimated_ms_without_reuse": 9000}
        on = {**known, **none, **estimate, "ttft_ms": ttft, "queue_ms": queued}
        off = None if without is None else {**on, "ttft_ms": without, "queue_ms": 0}
        given = page.evaluate(
            "async ([on, off]) => (await import('/static/comparison.js')).gain(on, off)", [on, off]
        )
        assert given.endswith(said)
