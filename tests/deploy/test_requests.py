"""Paths: whatever the router lets through means the same path to everyone, below ``/v1/`` or
``/api/``."""

from __future__ import annotations

import posixpath
import unicodedata
from urllib.parse import unquote, unquote_to_bytes

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvboost.deploy.requests import check_target, is_plain
from kvboost.serve.errors import ApiError
from support.live_server import live_router
from support.routed import answers, raw_request
from support.scripted_upstream import upstream

PARTS = [
    *("/", "//", ".", "..", "...", "\\", ";", "%", "#", "?", " ", "\0", "~", ":", "@", "{", "é"),
    *("%2e", "%2E", "%2f", "%2F", "%5c", "%5C", "%3b", "%25", "%252e", "%252F", "%00", "%0d%0a"),
    *("%20", "%7f", "%c0%ae", "%C0%AF", "%ff", "%e6%a8%a1", "%u002e", "%ef%bc%8e", "%ef%bc%8f"),
    *("%ef%bc%85", "%e2%80%a4", "2e", "2f", "v1", "api", "models", "org", "kvboost", "cache"),
    "http:",
]
TARGETS = st.lists(st.sampled_from(PARTS), max_size=8).map("".join)
REFUSED = [
    *("/v1/../kvboost/cache", "/v1/../kvboost/forget", "/v1/../metrics", "/v1/..", "/v1/./models"),
    *("/v1/a/../../kvboost", "/v1/%2e%2e/kvboost/cache", "/v1/.%2E/kvboost", "/v1/..%2Fkvboost"),
    *("/v1%2f..%2fkvboost", "/v1%2Fmodels", "/%761/models", "/v1//models", "//v1/models"),
    *("//evil/v1/models", "/v1/\\..\\kvboost", "/v1/..%5ckvboost", "/v1/%252e%252e/kvboost"),
    *("/v1/%25252e%25252e/x", "/v1/%00", "/v1/..;/kvboost/cache", "/v1/models;x=1", "/v1/.../x"),
    *("/v1/..%20/kvboost", "/v1/%c0%ae%c0%ae/kvboost", "/v1/%ef%bc%8e%ef%bc%8e/kvboost"),
    *("/v1/%u002e%u002e/kvboost", "/v1/%zz", "/v1/%", "/v1/{x}", "/v1/%0d%0aX:1", "/v1/%ff"),
    *("/api/../kvboost/cache", "/api//tags", "/api/%2e%2e/kvboost", "/%61pi/tags"),
]
FORWARDED = [
    *("/v1/models/org/model", "/v1/models/org%2Fmodel", "/v1/models/org%2fmodel"),
    *("/v1/models/ft:gpt-3.5@x~1", "/v1/models/%E6%A8%A1", "/v1/models/a%20b", "/v1/files/f-1/"),
    "/api/version",
]


def normalised(path: str) -> str:
    """``path`` without dot segments, for those who take backslashes for slashes, too."""
    ended = posixpath.normpath(path.replace("\\", "/")).replace("//", "/")
    return f"{ended}/" if path.endswith("/") else ended


@settings(max_examples=500)
@given(TARGETS.map("/v1/".__add__) | TARGETS.map("/api/".__add__) | TARGETS)
@example("/v1/models/org%2Fmodel")
@example("/v1/%2e%2e%2fkvboost")
def test_what_is_let_through_means_one_path_below_an_api(target: str) -> None:
    raw = target.encode()
    try:
        check_target("GET", raw)
    except ApiError as error:
        assert error.status == 400 and error.code == "ambiguous_path"
        return
    assert httpx.URL(f"http://upstream{target}").raw_path == raw
    path = target
    for _ in range(4):
        assert normalised(path).startswith(("/v1/", "/api/"))
        path = unicodedata.normalize("NFKC", unquote(path))
    assert normalised(path) == path
    assert unicodedata.normalize("NFKC", unquote_to_bytes(raw).decode()) == path


@pytest.mark.parametrize("target", FORWARDED)
def test_names_of_models_pass(target: str) -> None:
    assert is_plain(target.encode())
    check_target("GET", target.encode())


def test_a_router_sends_paths_on_as_they_are_or_not_at_all() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        for target in REFUSED:
            (refused,) = answers(router, raw_request(target))[:1]
            assert (target, refused) == (target, 400)
        assert not one.asked
        for target in FORWARDED:
            assert answers(router, raw_request(f'{target}?x=%2e%2e/../"a"'))[0] == 200
        assert [path for path, *_ in one.asked if path != "/v1/last"] == [
            f'{target}?x=%2e%2e/../"a"' for target in FORWARDED
        ]


def test_no_form_of_a_target_leaves_v1_and_other_methods_are_not_forwarded() -> None:
    with upstream() as one, live_router(one.url, health_seconds=60) as router:
        for target in (
            "/kvboost/cache",
            "http://localhost/kvboost/cache",
            "http://u@localhost/../metrics",
        ):
            assert answers(router, raw_request(target))[0] in (400, 404)
        for method in ("TRACE", "CONNECT", "PROPFIND"):
            sent = raw_request("/v1/completions", b"", "connection: close", method=method)
            assert answers(router, sent)[0] == 405
        assert not one.asked
