from __future__ import annotations

import torch

from kvboost.model.loading.fingerprint import fingerprint
from support.tiny import tiny_model


def test_an_adapter_beside_the_weights_changes_the_fingerprint() -> None:
    plain, adapted = tiny_model("llama"), tiny_model("llama")
    adapted.model.layers[0].self_attn.lora_A = torch.nn.Linear(64, 2, bias=False)
    assert fingerprint(plain, plain.config) != fingerprint(adapted, adapted.config)


def test_one_edited_number_or_another_rank_changes_the_fingerprint() -> None:
    model = tiny_model("llama")
    before = fingerprint(model, model.config)
    assert before == fingerprint(tiny_model("llama"), model.config)
    assert before != fingerprint(model, model.config, rank=1)
    with torch.no_grad():
        model.lm_head.weight[3, 5] += 1
    assert before != fingerprint(model, model.config)
