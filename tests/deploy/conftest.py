"""The client that tests of routers share is closed at the end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import routed


@pytest.fixture(scope="session", autouse=True)
def _close_client() -> Iterator[None]:
    yield
    routed.CLIENT.close()
