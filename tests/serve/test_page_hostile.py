"""What hostile answers, other pages and a browser's storage could make of the page, and what is
copied from it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import unicodedata
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.browser import OpenPage, answered, ask_alone, expect, open_settings
from support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Page

MODEL = '<b onclick=alert(1)>"it\'s"</b>'
NASTY = (
    "It's \"so\" `id` $(id) ${HOME} $HOME !! !x \\ \\n 'JSON'\nJSON\nEOF\n\tend;\x1b[201~\x07 é 😀"
)
NASTY += "\u202e\u2028\x85\x7f\ue000\U000e0041\ufeff{}[]()*?#~&|<>%"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    fake = FakeEngine()
    fake.context_length = None
    fake.model_name = MODEL
    return fake


# Commands


class Shell:
    """Runs a copied command with a ``curl`` that writes down what it is given."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        curl = folder / "curl"
        curl.write_text(
            f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{folder}/args'\ncat > '{folder}/body'\n"
        )
        curl.chmod(0o755)

    def run(self, command: str, *shell: str) -> tuple[list[str], bytes]:
        """The arguments and the input of ``curl``. The command must do nothing else."""
        for name in ("args", "body"):
            (self._folder / name).unlink(missing_ok=True)
        env = {"PATH": f"{self._folder}:{os.environ['PATH']}", "KVBOOST_KEY": "k", "PS1": ""}
        subprocess.run(["bash", "-n"], input=command.encode(), check=True, timeout=60)
        done = subprocess.run(
            shell, input=command.encode(), env=env, capture_output=True, timeout=60, check=True
        )
        assert done.stdout == b""
        args = (self._folder / "args").read_bytes().decode().split("\0")[:-1]
        return args, (self._folder / "body").read_bytes()


SHELLS = [("bash",), ("sh",), ("bash", "--norc", "--noprofile", "-i")]


def called(program: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of ``OpenAI(...)`` and of ``create(...)`` in a copied program. It calls nothing
    else that could do harm."""
    tree = ast.parse(program)
    names = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert names <= {"OpenAI", "client.chat.completions.create", "print", "json.loads"}
    calls = {
        ast.unparse(node.func): {str(word.arg): _value(word.value) for word in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) not in ("print", "json.loads")
    }
    return calls["OpenAI"], calls["client.chat.completions.create"]


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        return json.loads(ast.literal_eval(node.args[0]))
    if isinstance(node, ast.Subscript):
        return ast.unparse(node)
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    return ast.literal_eval(node)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("'\"`$!\\\n\r\t\0{}@"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
REQUESTS = st.fixed_dictionaries(
    {"model": TEXTS, "messages": st.lists(JSON_VALUES, max_size=3), "kvboost": JSON_VALUES},
    optional={"tools": JSON_VALUES, "cache_salt": TEXTS, "temperature": st.floats(0, 2)},
)


def test_copied_commands_are_exactly_the_request(open_page: OpenPage, tmp_path: Path) -> None:
    page, shell = open_page(), Shell(tmp_path)
    page.evaluate("async () => { window.snippets = await import('/static/snippets.js'); }")
    base = "http://127.0.0.1:8000/it's/v1"

    def snippet(kind: str, request: Any, needs_key: bool) -> str:
        made: str = page.evaluate(
            "([kind, request, base, key]) => snippets[kind](JSON.parse(request), base, key)",
            [kind, json.dumps(request), base, needs_key],
        )
        unseen = {c for c in made if unicodedata.category(c) in ("Cc", "Cf", "Zs", "Zl", "Zp")}
        assert unseen <= {" ", "\n"}
        return made

    @settings(max_examples=40, deadline=None)
    @given(REQUESTS, st.booleans())
    def check(request: dict[str, Any], needs_key: bool) -> None:
        args, body = shell.run(snippet("curl", request, needs_key), "bash")
        assert args[:2] == ["-sN", f"{base}/chat/completions"]
        assert args[2:4] == ["-H", "content-type: application/json"]
        assert args[4:-2] == (["-H", "authorization: Bearer k"] if needs_key else [])
        assert args[-2:] == ["--data-binary", "@-"] and json.loads(body) == request
        client, sent = called(snippet("python", request, needs_key))
        key = "os.environ['KVBOOST_KEY']" if needs_key else "none"
        assert client == {"base_url": base, "api_key": key}
        assert sent.pop("extra_body") | sent == request

    check()
    deep: Any = NASTY
    for _ in range(300):
        deep = {"in": [deep]}
    for request in ({"model": NASTY, "messages": [NASTY * 2000]}, {"tools": [deep], NASTY: NASTY}):
        for command in SHELLS:
            _, body = shell.run(snippet("curl", request, False), *command)
            assert json.loads(body) == request
        _, sent = called(snippet("python", request, False))
        assert sent.pop("extra_body") | sent == request


def test_what_is_copied_is_what_was_sent(
    engine: FakeEngine, open_page: OpenPage, tmp_path: Path
) -> None:
    page, shell = open_page(permissions=["clipboard-read", "clipboard-write"]), Shell(tmp_path)
    sent: list[Any] = []
    page.on(
        "request",
        lambda one: sent.append(one.post_data_json) if one.url.endswith("/completions") else None,
    )
    open_settings(page)
    page.get_by_text("JSON schema and tools").click()
    engine.pieces = ["`rm`\x1b[201~\rx", "<tool_call>", json.dumps({"name": "f", "arguments": {}})]
    function = {"name": "f", "description": NASTY, "parameters": {"type": "object", "title": NASTY}}
    page.get_by_label("Tools a list").fill(json.dumps([{"type": "function", "function": function}]))
    for label in ("Documents", "System prompt"):
        page.get_by_label(label).fill(NASTY)
    ask_alone(page, NASTY)
    engine.pieces = ["Done."]
    page.get_by_label("Result of f").fill(NASTY)
    page.get_by_role("button", name="Send results").click()
    expect(page.locator(".turn")).to_have_count(2)
    answered(page)

    def copied(name: str, turn: int) -> str:
        buttons = page.locator(".turn").nth(turn).locator(".turn-actions button")
        button = buttons.nth(["Copy answer", "Copy as curl", "Copy as Python"].index(name))
        expect(button).to_have_text(name)
        button.click()
        expect(button).to_have_text("Copied")
        text: str = page.evaluate("navigator.clipboard.readText()")
        return text

    assert copied("Copy answer", 0) == "`rm`[201~x"
    for turn in range(2):
        assert sent[turn]["model"] == MODEL
        args, body = shell.run(copied("Copy as curl", turn), "bash")
        assert args[1] == f"{page.url}v1/chat/completions" and json.loads(body) == sent[turn]
        _, request = called(copied("Copy as Python", turn))
        assert request.pop("extra_body") | request == sent[turn]


# Answers


def test_links_show_where_they_lead_and_nothing_is_loaded(
    engine: FakeEngine, open_page: OpenPage
) -> None:
    page = open_page()
    lines = [
        "[https://bank.example](https://evil.example/x)",
        "[bank](https://bank.example@evil.example/)",
        "[a](JaVaScRiPt:alert(1)) [b](data:text/html,<script>alert(1)</script>) [c](vbscript:x)",
        "[d](//evil.example) [e](https:evil) [f](file:///etc/passwd) [g](blob:x) [h](https://)",
        "![i](https://evil.example/pixel.png?secret) ![j](data:image/svg+xml,<svg/onload=alert()>)",
        "<style>body{display:none}</style><iframe src=https://evil.example></iframe>",
        "<a href=javascript:alert(1)>k</a> &lt;script&gt; https://evil.example/l",
        "[me](mailto:me@example.org?bcc=all@example.org)",
    ]
    engine.pieces = ["\n\n".join(lines)]
    answer = ask_alone(page).locator(".answer")
    found = {link.get_attribute("href") for link in answer.locator("a").all()}
    assert found == {
        "https://evil.example/x",
        "https://bank.example@evil.example/",
        "https://evil.example/pixel.png?secret",
        "https://evil.example",  # the text of the iframe
        "https://evil.example/l",
        "mailto:me@example.org?bcc=all@example.org",
    }
    expect(answer).to_contain_text("https://bank.example (evil.example)")
    expect(answer).to_contain_text("bank (evil.example)")
    expect(answer).to_contain_text("me (me@example.org)")
    for link in answer.locator("a").all():
        assert link.get_attribute("rel") == "noopener noreferrer"
    expect(page.locator("img, iframe, style, main script, svg [onload], b[onclick]")).to_have_count(
        0
    )
    expect(page.locator("#server")).to_contain_text(MODEL)


def test_a_huge_answer_does_not_stop_the_page(engine: FakeEngine, open_page: OpenPage) -> None:
    page = open_page()
    for pattern in ("a|b\n" + " " * 400_000 + "-|x\n", "- *a\n" * 50_000, "```\n" * 60_000):
        if page.locator("#new").is_visible():
            page.get_by_role("button", name="New", exact=True).click()
        size = 64_000
        engine.pieces = [pattern[at : at + size] for at in range(0, len(pattern), size)]
        answer = ask_alone(page, "Much?").locator(".answer")
        expect(answer).to_contain_text("more character")
        assert answer.evaluate("node => node.textContent.length") < 300_000
        assert answer.evaluate("node => node.querySelectorAll('*').length") < 10_000
    page.reload()
    expect(page.get_by_label("Your question")).to_be_visible()


# Storage and other pages


def stored(page: Page) -> Any:
    return json.loads(page.evaluate("localStorage.getItem('kvboost-conversations:/')"))


def store(page: Page, text: str) -> None:
    page.evaluate("text => localStorage.setItem('kvboost-conversations:/', text)", text)
    page.reload()


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values within ``value``."""
    entries: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        entries = list(value.items())
    elif isinstance(value, list):
        entries = list(enumerate(value))
    for name, inner in entries:
        yield (*path, name)
        yield from places(inner, (*path, name))


def test_stored_conversations_that_the_page_did_not_write_do_no_harm(
    engine: FakeEngine, open_page: OpenPage
) -> None:
    page = open_page()
    engine.pieces = ["Because."]
    ask_alone(page)
    [good] = stored(page)

    injected = deepcopy(good)
    injected["turns"][0]["request"]["x=__import__('os').abort(), y"] = 1
    polluted = '{"__proto__": {"polluted": 1}, "constructor": {"prototype": {"polluted": 1}}}'
    for text in ("{", polluted, f'[{polluted}, {{"turns": [{{}}]}}]'):
        store(page, text)
        expect(page.locator(".turn")).to_have_count(0)
    store(page, json.dumps([None, 1, {"turns": 3}, injected, {**good, "at": "now"}, good]))
    assert page.locator(".asked").all_inner_texts() == ["Why?"]
    expect(page.locator("#conversations option")).to_have_count(1)
    assert page.evaluate("({}).polluted === undefined && [].polluted === undefined")
    store(page, json.dumps([good]) + " " * 2_500_000)
    expect(page.locator(".turn")).to_have_count(0)

    # Any value may have become any other: what is left of it can still be shown.
    wrong = [None, True, 1e308, "constructor", [], [None], {"__proto__": 1}]
    spoilt = []
    for place in places(good):
        for value in wrong:
            one = deepcopy(good)
            inner = one
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = value
            spoilt.append(one)
    shown = page.evaluate(
        """async (all) => {
          const { storedConversations } = await import("/static/stored.js");
          const { TurnView } = await import("/static/turns.js");
          const { ReportView } = await import("/static/report.js");
          const { messagesOf, titleOf } = await import("/static/conversations.js");
          const hooks = { onShown() {}, onDrawn() {} };
          let turns = 0;
          for (const one of all.flatMap((one) => storedConversations([one], 20))) {
            titleOf(one);
            messagesOf(one, []);
            for (const turn of one.turns) {
              new TurnView(turn, hooks).offerResults();
              if (turn.answer.report) {
                new ReportView(document.createElement("div")).showTurn(turn);
              }
              turns += 1;
            }
          }
          return turns;
        }""",
        spoilt,
    )
    assert 0 < shown < len(spoilt)


def test_the_page_works_where_storage_is_blocked(engine: FakeEngine, open_page: OpenPage) -> None:
    page = open_page()
    page.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"]) {
          Object.defineProperty(window, name, { get() { throw new DOMException("blocked"); } });
        }"""
    )
    page.reload()
    engine.pieces = ["Because."]
    expect(ask_alone(page).locator(".answer")).to_have_text("Because.")
    page.get_by_role("button", name="Clear history").click()
    page.get_by_role("button", name="Clear them").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_no_other_page_can_frame_the_page(address: str, open_page: OpenPage) -> None:
    other = open_page().context.new_page()
    with other.expect_event("requestfailed", lambda request: request.url == address):
        other.set_content(f"<iframe src='{address}'></iframe>")
    expect(other.frame_locator("iframe").locator("#show")).to_have_count(0)
    assert not any(frame.url.startswith(address) for frame in other.frames)
