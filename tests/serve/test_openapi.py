"""The OpenAPI document is true: schemathesis looks for a valid or invalid request whose response is
not documented."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kvboost import KVBoost
from kvboost.serve.app import create_app
from kvboost.serve.http.openapi import numbers_below
from kvboost.serve.settings import ApiKey, ServerSettings
from support.fake_engine import FakeEngine
from support.live_server import LiveServer, live_server
from support.tiny import byte_tokenizer, tiny_model

JUDGED_LATER = re.compile(
    r"tools|tool_choice|response_format|guided_|structured_outputs|template_options|text.format"
    r"|json_schema|regex|ebnf|grammar|suffix|min_(new_)?tokens|ignore_eos"
    r"|prompt_logprobs|continue_final_message"
    r"|messages\[\d+\]\.(content|tool_calls|tool_call_id|reasoning_content)"
    r"|input\[\d+\]\.arguments|messages: the last|messages\[\d+\]: a \w+ block|output_config"
    r"|messages\[\d+\]: \w+ goes with|format cannot|system does not|this model"
    r"|context_management(\.edits$|: edits=\[)"
)
"""Schemas, grammars, messages about tools, texts that do not fit the model, the order of edits: no
OpenAPI document can say which of them are good. Ollama's errors have no ``param``."""

KEY = "k-root"
SETTINGS = ServerSettings(
    served_names=("tiny",), keys=(ApiKey("root", KEY),), strict_fields=True, drain_seconds=5.0
)
DOCUMENT = create_app(FakeEngine(), SETTINGS).openapi()
EVERY_FIELD = bool(os.environ.get("KVBOOST_TEST_EVERY_FIELD"))
"""With the phase that changes every field in turn: thousands of requests, which schemathesis makes
before any test runs."""
REFUSED = (400, 401, 403, 404, 405, 409, 413, 415, 429)
"""How invalid requests may be refused: one with too many messages may also be too large."""


CONFIG = {
    "phases": {"coverage": {"enabled": EVERY_FIELD}},
    "checks": {"negative_data_rejection": {"expected-statuses": list(REFUSED)}},
}
schema = schemathesis.openapi.from_dict(DOCUMENT, config=SchemathesisConfig.from_dict(CONFIG))


@schema.auth()
class Auth:
    """schemathesis also sends requests without a key and with wrong keys."""

    def get(self, case, context) -> str:
        return KEY

    def set(self, case, data: str, context) -> None:
        case.headers["authorization"] = f"Bearer {data}"


class Brief(KVBoost):
    """Generates at most four tokens, even if a request asks for 2**31."""

    def astream(self, prompt, max_new_tokens=64, *args, **options):
        return super().astream(prompt, min(max_new_tokens, 4), *args, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    model = tiny_model("llama", max_position_embeddings=8192)
    with (
        Brief.from_model(model, byte_tokenizer()) as engine,
        live_server(engine, **vars(SETTINGS)) as started,
    ):
        yield started


@schema.parametrize()
@settings(
    max_examples=100 if EVERY_FIELD else 5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=not EVERY_FIELD,
)
def test_responses_are_as_documented(case, server) -> None:
    response = case.call(base_url=server.url)
    error = response.json()["error"] if response.status_code == 400 else {}
    if isinstance(error, str):  # Ollama's form
        error = {"message": error}
    is_judged_later = JUDGED_LATER.match(error.get("param") or error.get("message", ""))
    excluded = [positive_data_acceptance] if is_judged_later else []
    case.validate_response(response, excluded_checks=excluded)


@given(st.integers(1, 10**6), st.integers(0, 10**6))
def test_numbers_below_a_limit(limit: int, number: int) -> None:
    found = re.fullmatch(numbers_below(limit), str(number)) is not None
    assert found == (number < limit)


def test_every_route_documents_its_errors() -> None:
    assert set(DOCUMENT["paths"]) == {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"),
        *("/v1/responses", "/v1/responses/{response_id}"),
        *("/v1/responses/{response_id}/input_items", "/v1/messages", "/v1/messages/count_tokens"),
        *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags"),
        *("/api/ps", "/api/version", "/v1/models", "/v1/models/{model}", "/v1/load_lora_adapter"),
        *("/v1/unload_lora_adapter", "/kvboost/warm", "/kvboost/plan", "/kvboost/cache"),
        *("/kvboost/forget", "/kvboost/live", "/kvboost/pins", "/kvboost/pins/{name}"),
        *("/kvboost/documents", "/kvboost/files", "/kvboost/documents/{document_id}"),
        *("/kvboost/explain", "/kvboost/explain/{answer_id}", "/kvboost/sessions"),
        *("/kvboost/sessions/{session_id}", "/tokenize", "/detokenize", "/version", "/health"),
        *("/ready", "/metrics"),
    }
    for path, operations in DOCUMENT["paths"].items():
        for method, operation in operations.items():
            told = set(operation["responses"])
            assert {"200", "403", "431", "500", "503"} <= told and "422" not in told
            private = ("/v1/", "/api/", "/kvboost/", "/tokenize", "/detokenize")
            assert ("401" in told) == path.startswith(private)
            needs_type = method == "post" and not path.startswith("/api/")
            assert ("415" in told) == needs_type
