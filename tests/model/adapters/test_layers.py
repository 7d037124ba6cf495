"""Adapted rows of a packed forward are those of a model with the adapter merged into it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from kvboost.errors import AdapterError
from kvboost.model.adapters.adapter import Adapter, AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.adapters.layers import adapted_rows
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from support.adapters import LINEARS, QV, merge, write_adapter
from support.tiny import DEVICE, tiny_model

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
TARGETS = {
    "llama": LINEARS,
    "gemma2": LINEARS,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),
    "bloom": ("query_key_value", "dense_h_to_4h"),
}


def segment(forward: Forward, seed: int, adapter: Adapter | None, rows: int = 9) -> Segment:
    kv = RequestKV(forward.shape, 32)
    kv.adapter = None if adapter is None else AppliedAdapter(adapter)
    ids = torch.randint(0, 250, (rows,), generator=torch.Generator().manual_seed(seed))
    return Segment(kv, ids.to(DEVICE), range(rows), num_logits=rows)


def whole(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=ids[None]).logits[0]


@pytest.mark.parametrize("name", TARGETS)
def test_one_batch_of_base_and_adapters(name: str, tmp_path: Path) -> None:
    """Merged by hand: see ``merge``. Two requests share an adapter, and are not neighbours."""
    model = tiny_model(name)
    forward = Forward(model, packed=name != "bloom")
    folders = [
        write_adapter(tmp_path / str(seed), model, seed=seed, targets=TARGETS[name])
        for seed in (1, 2)
    ]
    a, b = (forward.load_adapter(read_adapter(folder)) for folder in folders)
    segments = [segment(forward, seed, one) for seed, one in enumerate((a, None, b, a))]
    given = [part for part in forward.run(segments) if isinstance(part, torch.Tensor)]
    forward.release()
    models = [merge(tiny_model(name), folders[0]), tiny_model(name)]
    models += [merge(tiny_model(name), folders[1]), models[0]]
    for part, one, expected in zip(given, segments, models, strict=True):
        torch.testing.assert_close(part, whole(expected, one.token_ids), **CLOSE)
    assert not torch.allclose(given[0], whole(models[1], segments[0].token_ids), atol=0.1)
    assert adapted_rows() is None


def test_adapters_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=list(LINEARS),
        rank_pattern={"down_proj": 7},
        alpha_pattern={"layers.1.mlp.down_proj": 3},
        init_lora_weights=False,
    )
    torch.manual_seed(3)
    tuned = peft.get_peft_model(tiny_model("llama"), config)
    tuned.save_pretrained(tmp_path)
    forward = Forward(tiny_model("llama"), packed=True)
    one = segment(forward, 0, forward.load_adapter(read_adapter(tmp_path)))
    (given,) = forward.run([one])
    assert isinstance(given, torch.Tensor)
    torch.testing.assert_close(given, whole(tuned.merge_and_unload(), one.token_ids), **CLOSE)


def test_rows_before_the_start_are_base_rows(tmp_path: Path) -> None:
    model = tiny_model("llama")
    forward = Forward(model, packed=True)
    adapter = forward.load_adapter(read_adapter(write_adapter(tmp_path, model)))
    for positions in (range(9), torch.arange(9)):
        base, some = (segment(forward, 0, None) for _ in range(2))
        some.kv.adapter = AppliedAdapter(adapter, 5)
        some = Segment(some.kv, some.token_ids, positions, num_logits=9)
        expected, given = forward([base]), forward([some])
        torch.testing.assert_close(given[:5], expected[:5], **CLOSE)
        assert not torch.allclose(given[5:], expected[5:], atol=0.1)


def test_hooks_are_there_only_for_adapters(tmp_path: Path) -> None:
    model = tiny_model("llama")
    forward = Forward(model, packed=True)
    query = model.model.layers[0].self_attn.q_proj
    assert not query._forward_hooks
    forward.load_adapter(read_adapter(write_adapter(tmp_path, model, targets=QV)))
    forward.load_adapter(read_adapter(write_adapter(tmp_path, model, targets=QV, seed=1)))
    assert len(query._forward_hooks) == 1 and not model.model.layers[0].mlp.up_proj._forward_hooks
    forward.remove_adapters()
    assert not query._forward_hooks


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    forward = Forward(tiny_model("llama"), packed=True)
    narrow = tiny_model("llama", hidden_size=32)
    deep = tiny_model("llama", num_hidden_layers=4)
    head = tiny_model("llama", tie_word_embeddings=False)
    for model, targets, said in (
        (narrow, QV, "belongs to another model"),
        (deep, QV, "has no such part"),
        (head, ("lm_head",), "embeddings and heads"),
        (head, ("input_layernorm",), "no linear layer but LlamaRMSNorm"),
    ):
        if targets == ("input_layernorm",):
            for layer in model.model.layers:
                layer.input_layernorm.weight.data = torch.ones(64, 64)
        files = read_adapter(write_adapter(tmp_path, model, targets=targets))
        with pytest.raises(AdapterError, match=said):
            forward.load_adapter(files)
