"""The access log: one line per request, with its tokens by source and its times."""

from __future__ import annotations

import logging
import re

import pytest

BODY = {"model": "fake", "prompt": "twelve bytes"}


def lines(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "kvboost.serve"]


def test_the_line_of_an_answer_has_tokens_and_times(client, caplog) -> None:
    caplog.set_level(logging.INFO)
    answer = client.post("/v1/completions", json={**BODY, "n": 2})
    (line,) = lines(caplog)
    pattern = (
        r"(\S+) POST '/v1/completions' 200 \d+ ms anyone prompt=12 cached=0 exact=0 approximate=0 "
        r"moved=0 computed=12 recomputed=0 generated=4 ttft_ms=\d+ finish=stop"
    )
    found = re.fullmatch(pattern, line)
    assert found is not None, line
    assert found[1] == answer.headers["x-request-id"]


def test_a_stream_is_one_line_when_it_has_ended(client, caplog) -> None:
    caplog.set_level(logging.INFO)
    client.post("/v1/completions", json={**BODY, "stream": True})
    (line,) = lines(caplog)
    assert "generated=2" in line and line.endswith("finish=stop")


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/completions", {"model": "fake"}, "code=missing param='prompt'"),
        ("/v1/completions", {**BODY, "n": "two"}, "code=invalid_value param='n'"),
        ("/v1/messages", {"model": "fake"}, "code=missing param='messages'"),
        ("/v1/completions", {**BODY, "model": "x\n"}, "code=model_not_found param='model'"),
    ],
)
def test_the_line_of_a_refused_request_says_why(client, caplog, path, body, said) -> None:
    caplog.set_level(logging.INFO)
    client.post(path, json=body)
    (line,) = lines(caplog)
    assert line.endswith(f" anyone {said}")


def test_requests_without_answers_and_the_page_are_one_line_each(client, caplog) -> None:
    caplog.set_level(logging.INFO)
    for path in ("/v1/models", "/", "/static/app.js", "/kvboost/live", "/health"):
        assert client.get(path).status_code == 200
    models, page = lines(caplog)
    assert models.endswith(" anyone -") and "GET '/' 200" in page
