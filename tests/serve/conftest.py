"""Servers over an engine without a model, and a browser for the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from starlette.testclient import TestClient

from kvboost import KVBoost
from kvboost.serve.app import create_app
from kvboost.serve.settings import ServerSettings
from support.browser import MISSING, open_browser
from support.chat_templates import QWEN, tokenizer_with
from support.fake_engine import FakeEngine
from support.live_server import live_server
from support.tiny import tiny_model

if TYPE_CHECKING:
    from openai import OpenAI
    from playwright.sync_api import Browser, Page


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serve_fake(fake: FakeEngine) -> Iterator[Callable[..., TestClient]]:
    """A client of a server over ``fake``, with settings of its own."""
    with ExitStack() as stack:

        def serve(**settings: Any) -> TestClient:
            app = create_app(fake, ServerSettings(**settings))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield serve


@pytest.fixture
def client(serve_fake: Callable[..., TestClient]) -> TestClient:
    return serve_fake()


@pytest.fixture
def calls(fake: FakeEngine) -> None:
    """The model thinks, speaks and calls a tool."""
    fake.thinks, fake.context_length = True, None
    fake.pieces = [
        *("<think>", "hm", "</think>\n", "I lo", "ok.\n<tool"),
        *('_call>\n{"name": "weather", "argu', 'ments": {"city": ', '"Rome"}}', "\n</tool_call>"),
    ]


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    """Its chats have tools. Modules that need another one make it themselves."""
    model = tiny_model("llama", max_position_embeddings=4096)
    with KVBoost.from_model(model, tokenizer_with(QWEN)) as engine:
        yield engine


@pytest.fixture(scope="module")
def openai(engine: KVBoost) -> Iterator[OpenAI]:
    """OpenAI's client of a server over the module's engine, whose model is "tiny"."""
    from openai import OpenAI

    with (
        live_server(engine, served_names=("tiny",)) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def address(engine: KVBoost) -> Iterator[str]:
    """The page of a server over the module's engine."""
    with live_server(engine) as server:
        yield f"{server.url}/"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not longer: while it is open, this thread has an event loop, and ``asyncio.run`` fails."""
    if MISSING:
        pytest.skip(MISSING)
    with open_browser() as opened:
        yield opened


@pytest.fixture
def open_page(browser: Browser, address: str) -> Iterator[Callable[..., Page]]:
    """Opens the page at ``address``. Whatever the browser complains of fails the test, except what
    ``allowed`` matches; so does anything that is fetched from elsewhere."""
    complaints: list[str] = []

    with ExitStack() as stack:

        def open_page(url: str = address, allowed: str = "^$", **context: object) -> Page:
            page = browser.new_context(**context).new_page()
            stack.callback(page.context.close)
            page.set_default_timeout(60_000)
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
