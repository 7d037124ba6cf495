"""Families that are close to those of ``support/tiny.py``: one test each, in float32.

It compares with stock transformers what differs between families: logits and greedy answers, what
follows cached rows at any split, moved passages that are recomputed, rotated keys, packed
requests, batches and adapters.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvboost import GenerationMode, KVBoost, SpanKind, StockModel, UnsupportedModelError
from kvboost.model import triton
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment
from kvboost.model.fit.features import features
from kvboost.model.loading.compat import ARCHITECTURES
from kvboost.model.loading.unsupported import WHY_NOT
from support.adapters import check_merged
from support.families import EXPERTS, FAMILIES, HAS_LATENTS, HERE, WINDOW, family_model
from support.hybrids import HYBRIDS, SEEING_HYBRIDS
from support.paged_engines import MEMORY, leaks, steps_of, use_pages
from support.tiny import (
    ALL_MODELS,
    DEVICE,
    OTHER_MODELS,
    SEEING,
    TEXT_PARTS,
    any_model,
    make_engine,
    random_ids,
)

BASELINE, EXACT, MOVED = GenerationMode
ALL_RECOMPUTED = {"recompute_strategy": "query", "recompute_ratio": 1.0}
CLOSE = {"atol": 1e-3, "rtol": 0}
MECHANISMS = ("cohere2_moe", "minimax_m2", "nanochat", "olmo3")
"""Neighbouring channels and layers without positions; experts and a part of a head; backwards;
two bases."""
ADAPTED = ("llama", "gemma2", "phi3", "gpt2", "bloom")
"""``tests/model/adapters`` adapts these."""


def test_every_language_model_of_transformers_is_in_one_table() -> None:
    known = [set(ARCHITECTURES), set(WHY_NOT)]
    assert not known[0] & known[1]
    new = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - known[0] - known[1]
    assert not new, (
        f"transformers has new families: {sorted(new)}. Try them with a row in "
        "tests/support/families.py and one in ARCHITECTURES (model/loading/compat.py), or say in "
        "model/loading/unsupported.py why not"
    )
    tested = {name.split("-")[0] for name in [*ALL_MODELS, *SEEING]} | set(FAMILIES)
    tested |= {*HYBRIDS, *SEEING_HYBRIDS, *TEXT_PARTS}
    assert set(ARCHITECTURES) == tested


@pytest.mark.skipif(not triton.is_available(), reason="KV in pages needs triton")
@pytest.mark.parametrize("name", MECHANISMS if DEVICE == "cpu" else HERE)
def test_pages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over KV in pages, with decode steps as on a GPU: exact and moved text."""
    model = family_model(name)
    stock = StockModel(copy.deepcopy(model))
    use_pages(monkeypatch)
    with make_engine(model, max_kv_bytes=MEMORY) as engine:
        first, second = random_ids(40, 5), random_ids(45, 6)
        engine.warm([*first, *second])
        prompt = [*second, *first]
        answer = engine.generate(prompt, 3, MOVED, ignore_eos=True, **ALL_RECOMPUTED)
        assert answer.moved_tokens >= 40 and steps_of(engine).num_steps >= 2
        again = engine.generate(prompt, 3, BASELINE, ignore_eos=True)
        logits = stock.logits([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == answer.token_ids == again.token_ids
        assert leaks(engine) == []


@pytest.mark.parametrize("name", [*HERE, *ALL_MODELS, *SEEING])
def test_family(name: str, tmp_path: Path) -> None:
    if name == "kimi_k25" and not HAS_LATENTS:
        pytest.skip("transformers has it since 5.22")
    model = family_model(name) if name in HERE else any_model(name)
    stock = StockModel(copy.deepcopy(model))
    says = features(model.config)
    with make_engine(model, strict=says.exact == "yes") as engine:
        check_exact_reuse(engine, stock)
        assert (says.moved == "yes") == (name not in OTHER_MODELS)
        if says.moved == "yes":
            check_moved_reuse(engine, stock)
            check_moved_keys(engine)
        assert (says.batch == "yes") == (name not in ("bloom", "mpt"))
        if says.batch == "yes":
            check_packed_rows(engine, stock)
        if name not in (*SEEING, *ADAPTED):
            check_adapters(engine, stock, tmp_path)


def check_exact_reuse(engine: KVBoost, stock: StockModel) -> None:
    ids = random_ids(90, seed=1)
    answers = engine.generate_batch([ids, ids[:9], ids[:50]], 4, BASELINE, ignore_eos=True)
    for answer, length in zip(answers, (90, 9, 50), strict=True):
        logits = stock.logits([*ids[:length], *answer.token_ids])
        assert answer.token_ids == logits[length - 1 : -1].argmax(-1).tolist()
    logits = stock.logits(ids)[60:]
    for mode, known in ((BASELINE, 0), (EXACT, 17), (EXACT, 50)):
        engine.warm(ids[:known], cache_salt=str(known)) if known else None
        scored = engine.score(ids[:61], [*ids[61:], 0], mode, cache_salt=str(known))
        spans = scored.reuse.spans
        assert sum(s.num_tokens for s in spans if s.kind is SpanKind.EXACT) >= known
        torch.testing.assert_close(scored.logits, logits, **CLOSE)


def check_moved_reuse(engine: KVBoost, stock: StockModel) -> None:
    first, second, question = random_ids(40, 5), random_ids(45, 6), random_ids(20, 8)
    engine.warm([*random_ids(9, 7), *first, *second, *question])
    prompt, answer = [*random_ids(4, 9), *second, *first, *question], random_ids(6, 3)
    scored = engine.score(prompt, answer, MOVED, **ALL_RECOMPUTED)
    moved = [s.num_tokens for s in scored.reuse.spans if s.kind is SpanKind.MOVED]
    assert sum(moved) >= 85
    torch.testing.assert_close(
        scored.logits, stock.logits([*prompt, *answer])[len(prompt) - 1 : -1], **CLOSE
    )


def check_moved_keys(engine: KVBoost) -> None:
    """Keys of layer 0 depend on nothing but the token and its position."""
    forward = engine.model.forward
    rotation, _ = engine.runtime.backend.rotation.at(0)
    kv = make_kv(forward.shape, 256)
    ids = torch.tensor(random_ids(200, seed=2) + random_ids(40, seed=3) * 2)[-230:]
    forward([Segment(kv, ids, range(len(ids)))])
    first, again = (kv.layer(0, end - 40, end)[0] for end in (190, 230))
    alike = first.repeat(len(rotation.kinds), 1, 1, 1)
    moved = torch.empty_like(alike)
    rotation.move(alike, 40, moved)
    torch.testing.assert_close(moved[0], again[0], atol=1e-4, rtol=0)
    rotates = rotation.spread(rotation.cos_sin(0, torch.tensor([40])), first.shape[3])[1].any()
    assert torch.equal(first[0], again[0]) != bool(rotates)


def check_packed_rows(engine: KVBoost, stock: StockModel) -> None:
    """A tail, a whole prompt and rows with gaps, in one forward."""
    forward = engine.model.forward
    prompts = [torch.tensor(random_ids(length, seed=length)) for length in (40, 7, 33)]
    kvs = [make_kv(forward.shape, 64) for _ in prompts]
    forward([Segment(kvs[0], prompts[0][:35], range(35), 0)])
    forward([Segment(kvs[2], prompts[2], range(33), 0)])
    gaps = torch.tensor([3, 10, 11, 30, 32])
    packed = forward(
        [
            Segment(kvs[0], prompts[0][35:], range(35, 40)),
            Segment(kvs[1], prompts[1], range(7)),
            Segment(kvs[2], prompts[2][gaps], gaps),
        ]
    )
    expected = [stock.logits(prompt.tolist())[-1] for prompt in prompts]
    torch.testing.assert_close(packed, torch.stack(expected), **CLOSE)


def check_adapters(engine: KVBoost, stock: StockModel, folder: Path) -> None:
    """An adapter of the attention's projections equals the same adapter merged by hand."""
    forward = engine.model.forward
    attention = next(
        one for one in forward.model.modules() if hasattr(one, "layer_idx") and _linears(one)
    )
    targets = _linears(attention)
    check_merged(engine, stock, folder, targets)


def _linears(module: nn.Module) -> list[str]:
    return [name for name, one in module.named_children() if isinstance(one, nn.Linear)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("phimoe", WINDOW),
        ("qwen2_moe", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2_moe", {**WINDOW, "use_sliding_window": False}),
        ("olmoe", {**WINDOW, "head_dim": 8}),  # its config tells one, and its mask has none
    ],
)
def test_a_window_that_only_the_mask_tells(name: str, options: dict[str, Any]) -> None:
    model = family_model(name, {**EXPERTS, **options})
    stock = StockModel(copy.deepcopy(model))
    with make_engine(model) as engine:
        check_exact_reuse(engine, stock)
        check_moved_reuse(engine, stock)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_give_each_request_what_it_gets_alone(implementation: str) -> None:
    model = family_model("qwen3_moe")
    model.set_experts_implementation(implementation)
    with make_engine(model) as engine:
        check_packed_rows(engine, StockModel(family_model("qwen3_moe")))


def test_a_model_that_is_not_supported_says_why() -> None:
    model = family_model("qwen3_moe", EXPERTS)
    model.config.model_type = "kimi_linear"
    with pytest.raises(UnsupportedModelError, match="keeps a state of linear layers in a way"):
        make_engine(model)


def test_a_wrong_row_of_the_table_is_found_when_the_model_loads(monkeypatch) -> None:
    monkeypatch.setattr("kvboost.model.loading.key_scales.FAMILIES", ())
    model = family_model("hunyuan_v1_dense", {})
    with pytest.raises(UnsupportedModelError, match="change with their position in a way"):
        make_engine(model)
    with make_engine(model, strict=False) as engine:
        assert engine.model.rotation is None
        assert engine.verify_correctness(max_new_tokens=2)
