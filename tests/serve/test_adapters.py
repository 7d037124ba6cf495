"""Adapters over HTTP: their names are names of models."""

from __future__ import annotations

import pytest

from kvboost.errors import AdapterError, AdapterNotFoundError, ConfigError
from kvboost.serve.settings import ApiKey

LOAD = {"lora_name": "poet", "lora_path": "/adapters/poet"}
KEYS = (ApiKey("ann", "k-ann"), ApiKey("root", "k-root", is_admin=True))


def test_an_adapter_is_loaded_named_listed_and_unloaded(client, fake) -> None:
    asked = {"model": "poet", "messages": [{"role": "user", "content": "hi"}]}
    assert client.post("/v1/chat/completions", json=asked).status_code == 404
    loaded = client.post("/v1/load_lora_adapter", json=LOAD)
    assert loaded.status_code == 200
    assert loaded.json()["parent"] == "fake" and loaded.json()["digest"] == "d1"
    assert fake.asked == [{"load": "poet", "path": "/adapters/poet", "in_place": False}]
    listed = {one["id"]: one for one in client.get("/v1/models").json()["data"]}
    assert listed["poet"]["parent"] == "fake" and "parent" not in listed["fake"]
    assert listed["poet"]["max_model_len"] == listed["fake"]["max_model_len"] == 100
    assert client.get("/v1/models/poet").json() == listed["poet"]
    names = client.get("/openapi.json").json()["components"]["schemas"]["ChatRequest"]
    assert names["properties"]["model"]["enum"] == ["fake", "poet"]
    assert client.post("/v1/chat/completions", json=asked).json()["model"] == "poet"
    assert fake.asked[-1]["adapter"] == "poet"
    assert client.post("/v1/completions", json={"model": "fake", "prompt": "x"}).is_success
    assert "adapter" not in fake.asked[-1]
    again = {**LOAD, "load_inplace": True}
    assert client.post("/v1/load_lora_adapter", json=again).status_code == 200
    gone = client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    assert gone.json() == {"id": "poet", "object": "model", "deleted": True}
    assert client.post("/v1/chat/completions", json=asked).status_code == 404
    unknown = client.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert unknown.json()["error"]["param"] == "lora_name"
    assert "engine." not in unknown.json()["error"]["message"]


def test_what_cannot_be_loaded_is_refused(client, fake) -> None:
    for error, status, code in (
        (AdapterNotFoundError("there is none"), 404, "adapter_not_found"),
        (AdapterError("DoRA"), 400, "adapter_refused"),
    ):
        fake.refuse = error
        answer = client.post("/v1/load_lora_adapter", json=LOAD)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    taken = client.post("/v1/load_lora_adapter", json={**LOAD, "lora_name": "fake"})
    assert taken.status_code == 400 and taken.json()["error"]["param"] == "lora_name"


def test_only_administrators_load_and_unload(serve_fake, fake) -> None:
    client = serve_fake(keys=KEYS)
    for path, body in (
        ("/v1/load_lora_adapter", LOAD),
        ("/v1/unload_lora_adapter", {"lora_name": "poet"}),
    ):
        assert client.post(path, json=body).status_code == 401
        ann = client.post(path, json=body, headers={"authorization": "Bearer k-ann"})
        assert ann.status_code == 403
        root = client.post(path, json=body, headers={"authorization": "Bearer k-root"})
        assert root.status_code == 200
    assert not fake.loaded


def test_an_adapter_must_not_hide_behind_the_model(serve_fake, fake) -> None:
    fake.load_adapter("fake", "x", in_place=False)
    with pytest.raises(ConfigError, match="'fake' names both"):
        serve_fake()
