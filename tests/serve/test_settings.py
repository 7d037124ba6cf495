"""Settings and key files."""

from __future__ import annotations

import pytest

from kvboost.errors import ConfigError
from kvboost.serve.settings import ApiKey, ServerSettings, is_loopback, parse_keys


def test_the_three_forms_of_keys() -> None:
    lines = ["# ours", "", "plain", " ann:secret ", "admin:root:word"]
    assert parse_keys(lines, "keys.txt") == (
        ApiKey("key-1", "plain"),
        ApiKey("ann", "secret"),
        ApiKey("root", "word", is_admin=True),
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a:b:c"], "entry 1 of keys.txt"),
        (["ok", "admin:a:b:c"], "entry 2 of keys.txt"),
        (["ann:"], "entry 1"),
        ([":key"], "entry 1"),
        (["ann:two words"], "printable ASCII"),
        (["ann:schlüssel"], "printable ASCII"),
        (["ann:x", "ann:y"], "a name occurs twice"),
        (["ann:x", "bob:x"], "a key occurs twice"),
    ],
)
def test_a_wrong_key_file_is_refused_without_showing_keys(lines, message) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_keys(lines, "keys.txt")
    assert "schlüssel" not in str(caught.value) and "two words" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "turbo"}, "mode='turbo'"),
        ({"timeout": -1.0}, "timeout=-1.0"),
        ({"max_body_bytes": 10}, "max_body_bytes=10"),
        ({"default_max_tokens": 0}, "default_max_tokens=0"),
        ({"served_names": ("",)}, "served_names"),
        ({"metrics": "secret"}, "metrics='secret'"),
        ({"metrics": "key"}, "needs API keys"),
        ({"max_connections": 0}, "max_connections=0"),
        ({"max_anonymous_requests": 0}, "max_anonymous_requests=0"),
        ({"head_seconds": -1}, "head_seconds=-1"),
        ({"drain_seconds": float("nan")}, "drain_seconds"),
    ],
)
def test_wrong_settings_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**settings)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
    ],
)
def test_loopback_addresses(host, is_local) -> None:
    assert is_loopback(host) is is_local
