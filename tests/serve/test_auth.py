"""Keys, administrators, and salts per tenant."""

from __future__ import annotations

import pytest

from kvboost.serve.auth import Keys
from kvboost.serve.errors import ApiError
from kvboost.serve.settings import ApiKey, ServerSettings

KEYS = (ApiKey("ann", "k-ann"), ApiKey("bob", "k-bob"), ApiKey("root", "k-root", is_admin=True))
COMPLETION = {"model": "fake", "prompt": "hi"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "header",
    [None, "", "k-ann", "Bearer", "Bearer ", "Basic k-ann", "Bearer k-an", "Bearer k-ann2", "é"],
)
def test_requests_without_a_valid_key_are_refused(serve_fake, header) -> None:
    client = serve_fake(keys=KEYS)
    headers = {} if header is None else {"authorization": header.encode()}
    refused = client.post("/v1/completions", content=b"not even JSON", headers=headers)
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"


def test_keys_open_what_they_may(serve_fake, client) -> None:
    keyed = serve_fake(keys=KEYS)
    assert keyed.post("/v1/completions", json=COMPLETION, headers=bearer("k-ann")).is_success
    assert keyed.get("/v1/models", headers={"authorization": "bearer  k-bob"}).is_success
    assert keyed.get("/kvboost/cache").status_code == 401
    refused = keyed.get("/kvboost/cache", headers=bearer("k-ann"))
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "not_admin"
    assert keyed.get("/kvboost/cache", headers=bearer("k-root")).is_success
    without_root = serve_fake(keys=KEYS[:2])
    assert without_root.get("/kvboost/live", headers=bearer("k-bob")).is_success
    assert client.get("/kvboost/cache").is_success  # there are no keys
    assert client.get("/v1/models", headers=bearer("whatever")).is_success


def test_the_page_and_health_are_public(serve_fake) -> None:
    client = serve_fake(keys=KEYS)
    for path in ("/", "/health", "/ready", "/metrics"):  # and the document: test_metrics.py
        assert client.get(path).is_success


def test_every_key_has_its_own_salts(serve_fake, fake) -> None:
    client = serve_fake(keys=KEYS)
    for key in ("k-ann", "k-bob", "k-ann"):
        for salt in ("", "x"):
            asked = {**COMPLETION, "cache_salt": salt}
            client.post("/v1/completions", json=asked, headers=bearer(key))
    salts = [asked["cache_salt"] for asked in fake.asked]
    assert len(set(salts[:4])) == 4 and salts[:2] == salts[4:]
    assert all(len(salt) >= 32 and "k-ann" not in salt for salt in salts)


def test_a_shared_cache_uses_only_the_requests_salts(serve_fake, fake) -> None:
    client = serve_fake(keys=KEYS, shared_cache=True)
    for key in ("k-ann", "k-bob"):
        client.post("/v1/completions", json={**COMPLETION, "cache_salt": "x"}, headers=bearer(key))
    assert [asked["cache_salt"] for asked in fake.asked] == ["x", "x"]


def test_no_salt_reaches_another_tenants_cache() -> None:
    keys = Keys(ServerSettings(keys=KEYS))
    ann, bob = keys.tenant("Bearer k-ann"), keys.tenant("Bearer k-bob")
    assert ann.salt("x") == keys.tenant("Bearer k-ann").salt("x")
    assert ann.salt(bob.salt()) != bob.salt() and ann.salt() != bob.salt()
    assert keys.named("bob") == bob
    with pytest.raises(ApiError, match="no tenant 'eve'"):
        keys.named("eve")


def test_printed_settings_do_not_show_keys() -> None:
    assert "k-ann" not in repr(ServerSettings(keys=KEYS))


def test_the_engine_counts_requests_by_tenant(serve_fake, fake) -> None:
    """Not by salt: a new salt for each request must not evade fairness."""
    client = serve_fake(keys=KEYS)
    for key, salt in (("k-ann", "1"), ("k-ann", "2"), ("k-bob", "1")):
        body = {**COMPLETION, "cache_salt": salt}
        assert client.post("/v1/completions", json=body, headers=bearer(key)).is_success
    assert [asked["tenant"] for asked in fake.asked] == ["ann", "ann", "bob"]


@pytest.mark.parametrize("keys", [(), KEYS[:1]])
def test_a_single_tenant_may_use_the_whole_queue(serve_fake, fake, keys) -> None:
    client = serve_fake(keys=keys)
    assert client.post("/v1/completions", json=COMPLETION, headers=bearer("k-ann")).is_success
    assert fake.asked[0]["tenant"] == ""
