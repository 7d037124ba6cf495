"""Models with latent attention over pages: the answers are those over buffers."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost import GenerationMode, KVBoost, SpanKind, StockModel
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.latent import TOO_WIDE, LatentAttention
from kvboost.model.execution.segment import Rules, Segment
from kvboost.model.paged.pool import why_buffers
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.model.paged.step_batch import StepBatch
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, ROWS
from kvboost.reuse.repair import STRATEGIES
from support.adapters import merge, write_adapter
from support.families import HAS_LATENTS, family_model
from support.paged_engines import MEMORY, forward_of, leaks, paged_kv, steps_of, use_pages
from support.paged_kv import attention_weights
from support.replay_again import ReplayAgain
from support.tiny import DEVICE, make_engine, random_ids

pytestmark = pytest.mark.skipif(not HAS_LATENTS, reason="needs transformers 5.22")
_, EXACT, MOVED = GenerationMode
NAMES = ("deepseek_v2", "deepseek_v3", "minicpm3")
"""Neighbouring channels; YaRN and experts; halves."""
PROMPTS = [random_ids(length, length) for length in (90, 7, 150)]
SHUFFLED = [*PROMPTS[0][30:], *PROMPTS[2][:60], *PROMPTS[1]]


def engine_of(monkeypatch: pytest.MonkeyPatch, name: str, *, pages: bool, **config: Any) -> KVBoost:
    use_pages(monkeypatch, pages=pages)
    return make_engine(family_model(name), max_kv_bytes=MEMORY, **config)


def close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(given, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_answers_and_logits_equal_those_over_buffers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, in a batch, after known and after moved text, of which some rows are recomputed or
    all."""
    found: dict[bool, Any] = {}
    for pages in (False, True):
        with engine_of(monkeypatch, name, pages=pages) as engine:
            alone = [engine.generate(ids, 5, EXACT, ignore_eos=True) for ids in PROMPTS]
            others = [[*ids, 3] for ids in PROMPTS]
            batch = engine.generate_batch(others, 5, mode=EXACT, ignore_eos=True)
            again = engine.generate([*PROMPTS[2], 5, 6], 5, EXACT, ignore_eos=True)
            assert again.exact_tokens > 2 * PAGE
            options = {"recompute_strategy": "query"}
            scored = [
                engine.score(SHUFFLED, given, MOVED, recompute_ratio=ratio, **options)
                for given, ratio in (([4], 0.2), ([4, 5, 6], 1.0))
            ]
            tokens = [result.token_ids for result in [*alone, *batch, again]]
            found[pages] = tokens, [result.logits for result in scored]
            if pages:
                spans = [one for one in scored[0].reuse.spans if one.kind is SpanKind.MOVED]
                assert len(spans) > 4 and {one.tier for one in spans} == {"gpu"}
                runner = forward_of(engine).runner
                assert {kind for kind, _ in runner._forwards} >= {ROWS, REPAIRS, PROBES}
                assert steps_of(engine).num_steps > 20 and leaks(engine) == []
    assert found[True][0] == found[False][0]
    assert all(close(*both) for both in zip(found[True][1], found[False][1], strict=True))
    stock = StockModel(family_model(name)).logits([*SHUFFLED, 4, 5, 6])[len(SHUFFLED) - 1 : -1]
    assert close(found[True][1][1], stock) and not close(found[True][1][0], stock[:1])


def test_strategies_repair_as_over_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `auto`, which chooses between rows that the last bit ranks here."""
    found: dict[bool, list[torch.Tensor]] = {}
    for pages in (False, True):
        with engine_of(monkeypatch, "deepseek_v3", pages=pages) as engine:
            for ids in PROMPTS:
                engine.warm(ids)
            options = {"recompute_ratio": 0.3, "reuse_moved": "always"}
            found[pages] = [
                engine.score(SHUFFLED, [4], MOVED, recompute_strategy=name, **options).logits
                for name in sorted(set(STRATEGIES) - {"auto"})
            ]
    assert all(close(*both) for both in zip(found[True], found[False], strict=True))
    assert not close(found[True][0], found[True][1])


def test_a_request_alone_gets_what_it_gets_in_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(monkeypatch, "deepseek_v3", pages=True) as engine:
        alone = [engine.generate(ids, 6, EXACT, ignore_eos=True).token_ids for ids in PROMPTS]
    with engine_of(monkeypatch, "deepseek_v3", pages=True) as engine:
        batch = engine.generate_batch(PROMPTS, 6, mode=EXACT, ignore_eos=True)
        assert [result.token_ids for result in batch] == alone


def test_steps_are_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ReplayAgain()
    monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: capture)
    with engine_of(monkeypatch, "deepseek_v2", pages=False) as plain:
        expected = plain.generate(PROMPTS[0], 6, EXACT, ignore_eos=True).token_ids
    with engine_of(monkeypatch, "deepseek_v2", pages=True) as engine:
        for _ in range(2):
            assert engine.generate(PROMPTS[0], 6, EXACT, ignore_eos=True).token_ids == expected
        assert capture.names.count("the model") == 1 and steps_of(engine).num_steps >= 10
        assert leaks(engine) == []


def test_many_rows_over_many_latents_have_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = None
    for most, graphs in ((1 << 28, 1), (4 * 16 * 91, 0)):  # heads, rows and keys, of which one more
        monkeypatch.setattr("kvboost.reuse.paged.forwards.MOST_ABSORBED", most)
        with engine_of(monkeypatch, "deepseek_v2", pages=True) as engine:
            engine.warm(PROMPTS[0][:76])
            answer = engine.generate(PROMPTS[0] + [1, 2], 3, EXACT, ignore_eos=True)
            assert answer.exact_tokens == 76
            assert forward_of(engine).runner.num_runs == graphs
            expected = expected or answer.token_ids
            assert answer.token_ids == expected


@pytest.mark.parametrize("expanded", [False, True])
def test_packed_segments_of_one_form_and_of_both(
    expanded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those run that no graph has room for; some rows are absent."""
    model = family_model("deepseek_v3")
    stock = StockModel(copy.deepcopy(model))
    use_pages(monkeypatch)
    with make_engine(model, max_kv_bytes=MEMORY) as engine:
        forward, slab = forward_of(engine)._forward, forward_of(engine).slab
        kvs = [paged_kv(slab, 256) for _ in range(2)]
        ids = [torch.tensor(random_ids(length, length)) for length in (100, 90)]
        forward([Segment(kvs[0], ids[0][:80], range(80), 0)])
        forward([Segment(kvs[1], ids[1], range(90), 0)])
        gaps = torch.tensor([3, 40, 41, 89])
        forms = iter([expanded, True] * 2)  # of both segments, in two layers
        monkeypatch.setattr(LatentAttention, "expands", lambda *_: next(forms))
        found = forward(
            [Segment(kvs[0], ids[0][80:], range(80, 100), 20), Segment(kvs[1], ids[1][gaps], gaps)]
        )
        assert next(forms, None) is None
        of_each = [stock.logits(some.tolist()) for some in ids]
        assert close(found, torch.cat([of_each[0][80:], of_each[1][-1:]]))

        absent = torch.zeros(90, dtype=torch.bool)
        absent[20:60] = True
        slab.layers[0][kvs[1].holding.pages[0], :, 20:60] = torch.nan  # never written
        monkeypatch.setattr(LatentAttention, "expands", lambda *_: expanded)
        hidden = forward([Segment(kvs[1], ids[1][80:], range(80, 90), 10, absent=absent)])
        assert hidden.isfinite().all() and not close(hidden, of_each[1][80:])
        for kv in kvs:
            slab.release(kv.holding)


def test_a_step_has_more_heads_than_a_tile_has_rows() -> None:
    torch.manual_seed(1)
    heads, rotated, ends = 40, 8, (70, 5, 130)
    shape = KVShape(1, 1, 32, torch.float32, torch.device(DEVICE), sides=1)
    slab = Slab(shape, 12, 4)
    kvs = [paged_kv(slab, end) for end in ends]
    rows = torch.randn(1, 1, max(ends), 32, device=DEVICE)
    for kv, end in zip(kvs, ends, strict=True):
        kv.write(0, range(end), rows[:, :, -end:], rows[:, :, -end:])
        assert all(torch.equal(side, rows[:, :, -end:]) for side in kv.layer(0, 0, end))
    batch = StepBatch(slab, len(ends))
    numbers = torch.tensor([kv.holding.row for kv in kvs], device=DEVICE)
    query = torch.randn(len(ends), heads, 32, device=DEVICE)
    for back in (1, 2):  # loaded again
        positions = torch.tensor(ends, device=DEVICE) - back
        batch.load(numbers, positions, None)
        found = batch.attend_rows(0, query, Rules(0.3, rotated=rotated))[..., rotated:]
        for row, end in enumerate(ends):
            keys = rows[0, :, -end:]
            weights, _ = attention_weights(
                query[row : row + 1], keys, positions[row : row + 1], 0.3
            )
            expected = weights[:, 0] @ keys[0, :, rotated:]
            assert torch.allclose(found[row], expected, atol=1e-5)


def test_an_adapter_of_the_expansion_equals_merged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = family_model("deepseek_v3")
    folder = write_adapter(tmp_path, model, targets=("kv_b_proj", "q_b_proj"))
    merged = StockModel(merge(copy.deepcopy(model), folder))
    use_pages(monkeypatch)
    with make_engine(model, max_kv_bytes=MEMORY) as engine:
        engine.load_adapter("one", folder)
        for _ in range(2):  # read, and known
            scored = engine.score(PROMPTS[0], [4, 5], EXACT, adapter="one")
            expected = merged.logits([*PROMPTS[0], 4, 5])[len(PROMPTS[0]) - 1 : -1]
            assert close(scored.logits, expected)


def test_chunks_come_back_from_memory_into_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a restart, at the beginning and moved."""
    expected = {}
    for folder in (None, tmp_path):
        for _ in range(2):
            options = {} if folder is None else {"disk_cache_dir": folder, "kv_cache_bits": 8}
            with engine_of(monkeypatch, "minicpm3", pages=folder is not None, **options) as engine:
                engine.warm(PROMPTS[2])
                known = engine.generate([*PROMPTS[2], 9], 4, EXACT, ignore_eos=True)
                assert known.exact_tokens > 100
                prompt = [7, *PROMPTS[2][:100], *PROMPTS[1]]
                scored = engine.score(prompt, [4, 5], MOVED, recompute_strategy="none")
                given = known.token_ids, scored.logits
                if folder is None:
                    expected = given
                assert given[0] == expected[0] and close(given[1], expected[1])
                if folder is not None:
                    assert any("kv_cache_bits=8 has no effect" in note for note in engine.notes)


def test_latents_that_kernels_do_not_take_have_buffers() -> None:
    layer = {"qk_rope_head_dim": 64, "num_heads": 1, "qk_nope_head_dim": 1, "v_head_dim": 1}
    product = SimpleNamespace(bias=None)
    for width, fits in ((512, True), (32, False), (1024, False)):
        module = SimpleNamespace(**layer, kv_lora_rank=width, kv_b_proj=product)
        assert LatentAttention(module, "attention").fits_pages is fits
    with make_engine(family_model("deepseek_v2")) as engine:
        forward = engine.model.forward
        assert forward.fits_pages and "latents" not in why_buffers(forward)
        for latent in forward._latents:
            latent.fits_pages = False
        if DEVICE != "cpu":
            assert why_buffers(forward) == TOO_WIDE
