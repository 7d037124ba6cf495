"""Models whose layers keep states: each family of ``support/hybrids.py``, in float32.

Every test compares with stock transformers. What is reused ends where states are kept.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from kvboost import (
    ConfigError,
    GenerationMode,
    KVBoost,
    SpanKind,
    StockModel,
    UnsupportedModelError,
)
from kvboost.errors import ModelError
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment
from kvboost.model.execution.states import StateLost
from kvboost.model.loading.load import wrap
from support.adapters import check_merged
from support.hybrids import HERE, SEEING_HYBRIDS, hybrid_model, save_seeing
from support.tiny import byte_tokenizer, make_engine, random_ids

BASELINE, EXACT, MOVED = GenerationMode
MECHANISMS = ("bamba", "falcon_h1", "jamba", "lfm2", "qwen3_next", "zaya")
"""Mamba 2, alone and beside attention; Mamba 1; convolutions; a delta rule; states of keys."""
EVERY = 16
CLOSE = {"atol": 1e-3, "rtol": 0}


@pytest.mark.parametrize("name", HERE)
def test_family(name: str, tmp_path: Path) -> None:
    model = hybrid_model(name)
    stock = StockModel(copy.deepcopy(model))
    with make_engine(model, state_every=EVERY) as engine:
        check_any_rows(engine, stock)
        check_conversation(engine, stock)
        if name in MECHANISMS:
            check_exact_reuse(engine, stock)
            check_batch(engine, stock)
        check_adapters(engine, stock, tmp_path)
        assert engine.check_integrity() == []


def check_any_rows(engine: KVBoost, stock: StockModel) -> None:
    """Rows in pieces of any length, single ones too, give the logits of one forward."""
    forward, ids = engine.model.forward, random_ids(40, seed=2)
    kv = make_kv(forward.shape, len(ids))
    bounds = [0, 1, 2, 18, 19, 35, 40]
    logits = [
        forward([Segment(kv, torch.tensor(ids[start:end]), range(start, end), end - start)])
        for start, end in pairwise(bounds)
    ]
    torch.testing.assert_close(torch.cat(logits), stock.logits(ids), **CLOSE)


def check_exact_reuse(engine: KVBoost, stock: StockModel) -> None:
    """After text that was read up to any row, from the last states at or below it."""
    ids = random_ids(50, seed=1)
    logits = stock.logits(ids)[34:]
    for known, reused in ((0, 0), (17, 17), (29, 29), (35, 32), (50, 32)):
        salt = str(known)
        engine.warm(ids[:known], cache_salt=salt) if known else None
        scored = engine.score(ids[:35], [*ids[35:], 0], EXACT, cache_salt=salt)
        spans = scored.reuse.spans
        assert sum(s.num_tokens for s in spans if s.kind is SpanKind.EXACT) == reused
        torch.testing.assert_close(scored.logits, logits, **CLOSE)


def check_conversation(engine: KVBoost, stock: StockModel) -> None:
    """Each turn goes on where the answer before it ended."""
    ids, known = random_ids(20, seed=3), 0
    for turn in range(2):
        answer = engine.generate(ids, 5, EXACT, ignore_eos=True)
        assert answer.cached_tokens == known
        logits = stock.logits([*ids, *answer.token_ids])[len(ids) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
        known = len(ids) + 4
        ids = [*ids, *answer.token_ids, *random_ids(9, seed=10 + turn)]


def check_batch(engine: KVBoost, stock: StockModel) -> None:
    prompts = [random_ids(length, seed=length) for length in (40, 9, 30)]
    batched = engine.generate_batch(prompts, 3, EXACT, ignore_eos=True)
    for prompt, answer in zip(prompts, batched, strict=True):
        logits = stock.logits([*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        assert answer.token_ids == logits.argmax(-1).tolist()
    again = engine.generate_batch(prompts, 3, EXACT, ignore_eos=True)
    assert [one.token_ids for one in again] == [one.token_ids for one in batched]
    assert [one.cached_tokens for one in again] == [39, 0, 29]


def check_adapters(engine: KVBoost, stock: StockModel, folder: Path) -> None:
    """An adapter of all projections of attention equals the same adapter merged by hand."""
    if not stock.model.config.model_type.startswith("zamba"):  # its layers have weights together
        check_merged(engine, stock, folder, ["q_proj", "k_proj", "v_proj"])


@pytest.mark.parametrize("name", sorted(SEEING_HYBRIDS))
def test_a_model_that_sees_reads_text(name: str, tmp_path: Path) -> None:
    save_seeing(name, tmp_path)
    config = {"chunk_size": 16, "dtype": "float32", "state_every": EVERY}
    with KVBoost.from_pretrained(tmp_path, **config) as engine:
        ids = random_ids(40, seed=1)
        first = engine.generate(ids, 3, EXACT, ignore_eos=True)
        again = engine.generate(ids, 3, EXACT, ignore_eos=True)
        assert (first.cached_tokens, again.cached_tokens) == (0, 39)
        assert again.token_ids == first.token_ids


def test_text_that_moved_is_read_again() -> None:
    with make_engine(hybrid_model("lfm2")) as engine:
        first, second = random_ids(60, 1), random_ids(60, 2)
        engine.warm([*first, *second])
        answer = engine.generate([*second, *first], 3, MOVED, ignore_eos=True)
        assert (answer.cached_tokens, answer.moved_tokens) == (0, 0)
        assert any("which do not move" in note for note in answer.reuse.notes)
        assert engine.model.rotation is None


def test_a_failed_forward_loses_the_states() -> None:
    model = hybrid_model("lfm2")
    with make_engine(model) as engine:
        forward, ids = engine.model.forward, torch.tensor(random_ids(20, seed=1))
        kv = make_kv(forward.shape, 20)
        forward([Segment(kv, ids[:10], range(10))])
        broken = model.model.layers[-1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            forward([Segment(kv, ids[10:], range(10, 20))])
        broken.remove()
        assert kv.states is not None and kv.states.known_rows(20, current=True) == []
        with pytest.raises(StateLost, match="send it again"):
            forward([Segment(kv, ids[10:], range(10, 20))])
        whole = forward([Segment(kv, ids, range(20))])
        torch.testing.assert_close(whole[0], StockModel(model).logits(ids.tolist())[-1], **CLOSE)


def test_the_rows_of_a_batch_go_through_the_layers_once() -> None:
    """If one request of a batch fails, the others are asked for the same rows again."""
    with make_engine(hybrid_model("bamba")) as engine:
        forward, ids = engine.model.forward, torch.tensor(random_ids(20, seed=1))
        kv = make_kv(forward.shape, 20)
        segment = Segment(kv, ids[:10], range(10))
        first = forward([segment])
        assert forward([segment]) is not None and torch.equal(forward([segment]), first)
        forward([Segment(kv, ids[10:], range(10, 20))])
        with pytest.raises(StateLost):
            forward([Segment(kv, ids[10:], range(10, 20))])


def test_what_needs_rows_everywhere_is_refused(tmp_path: Path) -> None:
    model = hybrid_model("lfm2")
    with pytest.raises(ConfigError, match="cannot be streamed"):
        wrap(model, byte_tokenizer(), move=lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="far_kv_bytes"):
        make_engine(model, far_kv_bytes="1GiB")
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="do not stay packed"):
        KVBoost.from_pretrained(tmp_path, weights="packed")
    with pytest.raises((UnsupportedModelError, ConfigError), match="tp_size=2"):
        KVBoost.from_pretrained(tmp_path, tp_size=2)
    with pytest.raises(ConfigError, match=r"draft_model=.* keeps states"):
        make_engine(model, draft_model=tmp_path, speculate=4)
