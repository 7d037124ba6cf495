"""Servers over an engine without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from fake_engine import FakeEngine
from kvboost.serve.app import create_app
from kvboost.serve.settings import ServerSettings


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
