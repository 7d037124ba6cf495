"""Exact rows of ended requests stay in their pages, and later requests begin in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvboost import KVBoost
from kvboost.model import triton
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.slab import PAGE
from paged_engines import SMALL, leaks, paged_engine
from test_reuse import BASELINE, EXACT
from tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from torch_kernels import use_torch_kernels

TEXT = [(7 * index + 3) % 250 for index in range(100)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVBoost]:
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)
    monkeypatch.setattr("kvboost.runtime.beginnings.LEAST_ROWS", PAGE)
    with paged_engine(monkeypatch, "phi3", sizes=SMALL) as made:
        yield made
        assert leaks(made) == [] and made.check_integrity() == []


def shared(engine: KVBoost) -> int:
    return engine._runtime.beginnings.num_shared


def slab_of(engine: KVBoost):
    pool = engine._runtime.pool
    assert isinstance(pool, PagedPool)
    return pool.slab


def test_a_request_that_begins_alike_holds_the_same_pages(engine: KVBoost) -> None:
    engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    before = slab_of(engine).data.clone()
    prompt = [*TEXT[:80], 9, 8, 7]
    result = engine.generate(prompt, 3, EXACT, ignore_eos=True)
    assert shared(engine) == 1 and result.exact_tokens == 80
    spans = result.reuse.spans
    assert spans[0].tier == "shared" and spans[0].end == 64  # whole pages; the rest is copied
    assert slab_of(engine).used_bytes == 0  # they hold back nobody
    expected = engine.generate(prompt, 3, BASELINE, ignore_eos=True)
    assert result.token_ids == expected.token_ids and shared(engine) == 1
    kept = slab_of(engine)._retained
    first = next(iter(kept.values()))
    assert torch.equal(slab_of(engine).data[:, first], before[:, first]), "shared rows were written"


def test_rows_whose_logits_are_asked_for_are_computed(engine: KVBoost) -> None:
    """Also if a beginning goes beyond the first of them."""
    answer = engine.generate(TEXT, 2 * PAGE, EXACT, ignore_eos=True).token_ids
    scored = engine.score(TEXT, answer, EXACT)
    assert shared(engine) == 1 and len(scored.logits) == len(answer)
    full = engine.score(TEXT, answer, BASELINE)
    torch.testing.assert_close(scored.logits, full.logits, rtol=1e-3, atol=1e-3)


def test_pages_go_when_others_need_them_or_something_is_forgotten(engine: KVBoost) -> None:
    engine.generate(TEXT, 1, EXACT, ignore_eos=True)
    engine.forget("nothing that was read")
    engine.generate([*TEXT, 1], 1, EXACT, ignore_eos=True)
    assert shared(engine) == 0, "rows from before something was forgotten were used"
    engine.generate([*TEXT, 2], 1, EXACT, ignore_eos=True)
    assert shared(engine) == 1
    slab = slab_of(engine)
    others = []
    while (holding := slab.take(slab.most_rows)) is not None:
        others.append(holding)
    assert sum(len(holding.pages) for holding in others) == slab.num_pages
    assert not slab._retained, "retained pages held a request back"
    for holding in others:
        slab.release(holding)
    engine.generate([*TEXT, 3], 1, EXACT, ignore_eos=True)
    assert shared(engine) == 1


@pytest.mark.parametrize("options", [{"keep": False}, {"cache_salt": "other"}, {"mode": BASELINE}])
def test_what_is_not_kept_or_not_alike_is_not_shared(options, engine: KVBoost) -> None:
    engine.generate(TEXT, 1, **{"mode": EXACT, "ignore_eos": True, **options})
    engine.generate([*TEXT, 1], 1, EXACT, ignore_eos=True)
    assert shared(engine) == 0


def test_a_prompt_that_begins_otherwise_is_not_hashed(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    hashed = []
    monkeypatch.setattr("kvboost.runtime.request.prefix_hashes", hashed.append)
    other = engine.generate([1, *TEXT[1:]], 2, EXACT, ignore_eos=True, keep=False)
    assert other.cached_tokens == 0 and not hashed
