"""What an engine says about its model and device."""

from __future__ import annotations

import json

from support.tiny import DEVICE, make_engine, tiny_model


def test_facts_describe_the_model_the_device_and_the_options() -> None:
    model = tiny_model("llama")
    with make_engine(model, chunk_size=16, heal="off") as engine:
        facts = engine.facts()
    assert facts["architecture"] == "LlamaForCausalLM" and facts["layers"] == 3
    assert facts["parameters"] == sum(weights.numel() for weights in model.parameters())
    assert facts["dtype"] == "float32" and facts["device"].startswith(DEVICE)
    assert facts["device_name"] and (facts["threads"] is None) == (DEVICE != "cpu")
    assert facts["kv_bytes_per_token"] == 2 * 3 * 2 * 16 * 4  # k and v, layers, heads, width, bytes
    assert facts["chunk_size"] == 16 and facts["heal"] == "off"
    json.dumps(facts)


def test_layers_that_read_the_kv_of_others_count() -> None:
    with make_engine(tiny_model("gemma3n_text")) as engine:
        facts = engine.facts()
    assert facts["layers"] == 4
    assert facts["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4  # only two store KV
