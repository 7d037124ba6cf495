"""An engine over several tiers: what it read serves the next process, in fewer bits too."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
import torch

from kvboost import ConfigError, GenerationMode, PinError
from kvboost.cache.tiers.disk import REFRESH_SECONDS
from support.tiny import KINDS, any_model, make_engine, tiny_model

TEXT = "The quick brown fox jumps over the lazy dog, and then it goes home to sleep. " * 2
BASELINE = GenerationMode.BASELINE
PREFIX = GenerationMode.PREFIX_CACHE


def tiers(result) -> set[str | None]:
    return {span.tier for span in result.spans}


def test_the_next_engine_reads_from_disk_and_says_so(open_engine) -> None:
    first = open_engine()
    expected = first.generate(TEXT, 8, BASELINE)
    first.generate(TEXT, 8)
    first.close()
    second = open_engine()
    result = second.generate(TEXT, 8)
    assert result.token_ids == expected.token_ids
    assert tiers(result) == {"disk", None} and result.exact_tokens > 140
    assert tiers(second.generate(TEXT, 8)) == {"ram", None}
    assert second.cache_stats()["tiers"]["disk"]["hits"] > 0


def test_a_plan_names_the_tier_of_each_chunk(open_engine) -> None:
    open_engine().generate(TEXT, 1)
    first = open_engine()
    assert {span.tier for span in first.plan(TEXT).spans} == {None}  # not written yet
    other = open_engine()
    other.generate(TEXT, 1)
    other.flush()
    time.sleep(REFRESH_SECONDS)
    assert {span.tier for span in first.plan(TEXT).spans} == {"disk", None}


def test_moved_text_comes_from_disk_too(open_engine) -> None:
    first = open_engine()
    first.warm(TEXT, header="")
    first.close()
    second = open_engine(reuse_moved="always", recompute_strategy="none")
    result = second.generate("Something else entirely. " + TEXT + " What now?", 4)
    assert result.moved_tokens > 100 and tiers(result) == {"disk", None}


def test_memory_smaller_than_the_text_still_serves_it_from_disk(open_engine) -> None:
    one = 2 * 3 * 2 * 16 * 16 * 4  # bytes of a chunk of this model
    engine = open_engine(max_cache_bytes=3 * one)
    expected = engine.generate(TEXT, 8, BASELINE).token_ids
    for _ in range(3):
        assert engine.generate(TEXT, 8, PREFIX).token_ids == expected
        engine.flush()
    stats = engine.cache_stats()["tiers"]
    assert stats["ram"]["bytes"] <= 3 * one < stats["disk"]["bytes"]
    assert engine.generate(TEXT, 8, PREFIX).exact_tokens > 140


def test_precisions_do_not_share(open_engine) -> None:
    first = open_engine(kv_cache_bits=8)
    first.generate(TEXT, 1)
    first.close()
    assert open_engine(kv_cache_bits=16).generate(TEXT, 1).cached_tokens == 0
    assert open_engine(kv_cache_bits=8).generate(TEXT, 1).exact_tokens > 100


@pytest.mark.parametrize("name", KINDS)
def test_eight_bits_are_close_for_every_kind_of_attention(name) -> None:
    with make_engine(any_model(name), chunk_size=64, kv_cache_bits=8) as engine:
        prompt = engine.encode(TEXT)
        answer = engine.generate(prompt, 8, BASELINE).token_ids
        full = engine.score(prompt, answer, BASELINE).logits
        engine.generate(prompt, 1)
        scored = engine.score(prompt, answer, PREFIX)
        assert scored.reuse.cached_tokens >= 128
        assert 0 < (scored.logits - full).abs().mean() < 0.05 * full.std()


def test_fewer_bits_take_less_memory(open_engine) -> None:
    sizes = {}
    for bits in (16, 8, 4):
        with make_engine(tiny_model("llama"), chunk_size=32, kv_cache_bits=bits) as engine:
            engine.warm(TEXT[:128], header="")
            sizes[bits] = engine.cache_stats()["hot_memory_mb"]
    assert sizes[8] < 0.5 * sizes[16] and sizes[4] < 0.65 * sizes[8]  # 32-bit model, small heads


def test_a_growing_chat_in_four_bits_is_quantized_once(open_engine) -> None:
    """Turn after turn the last chunk is kept anew; what was packed of it stays what it was."""
    words = random.Random(0)
    engine = open_engine(kv_cache_bits=4, chunk_size=128)
    ids = [words.randrange(200) for _ in range(128)]
    store = engine.runtime.store
    before = {}
    for end in range(20, 129, 9):
        result = engine.generate(ids[:end], 1, PREFIX)
        (key,) = store.holdings.catalogue
        tensors = store.holdings.residency.ready(key).data.tensors
        for name, packed in before.items():
            assert torch.equal(tensors[name][:, :, : packed.shape[2]], packed)
        before = {name: tensors[name] for name in ("keys", "keys_range", "values", "values_range")}
    assert before["keys"].shape[2] == 4 and result.exact_tokens > 90


def test_a_pinned_text_stays_until_it_is_unpinned(open_engine) -> None:
    one = 2 * 3 * 2 * 16 * 16 * 4
    engine = open_engine(max_cache_bytes=12 * one, disk_cache_dir=None)
    assert engine.pin(TEXT[:80], header="").chunks == 5
    for number in range(10):
        engine.generate(f"{number} " + TEXT[:100], 1, PREFIX)
    assert engine.cache_stats()["pinned"] == 5
    assert engine.plan(TEXT[:90], PREFIX).cached_tokens == 80
    assert engine.unpin(TEXT[:80], header="").chunks == 5
    for number in range(10):
        engine.generate(f"{number} again " + TEXT[:100], 1, PREFIX)
    assert engine.plan(TEXT[:90], PREFIX).cached_tokens == 0


def test_pins_are_listed_bounded_and_end(open_engine) -> None:
    one = 2 * 3 * 2 * 16 * 16 * 4
    engine = open_engine(max_cache_bytes=12 * one, disk_cache_dir=None)
    pinned = engine.pin(TEXT[:80], header="", ttl=600)
    assert (pinned.tokens, pinned.chunks, pinned.bytes) == (80, 5, 5 * one)
    (listed,) = engine.pins()
    assert listed.name == pinned.name and 0 < listed.ttl <= 600
    engine.warm(TEXT[100:140], header="")
    with pytest.raises(PinError, match="max_pinned_bytes"):
        engine.pin_cached("more", engine.encode(TEXT[100:140]))
    with pytest.raises(ConfigError, match="ttl=-1"):
        engine.pin(TEXT, ttl=-1)
    assert engine.drop_pin(pinned.name).tokens == 80 and engine.pins() == []
    assert asyncio.run(engine.apin(TEXT[:40], header="", ttl=9)).tokens == 40
    small = open_engine(max_cache_bytes=4 * one, max_pinned_bytes="1GB", disk_cache_dir=None)
    with pytest.raises(PinError, match="only 64 of 80 tokens"):
        small.pin(TEXT[:80], header="")
    assert small.pins() == []


def test_a_pinned_conversation_holds_its_exact_rows_once_it_is_healed(open_engine) -> None:
    engine = open_engine(disk_cache_dir=None, heal="idle", reuse_moved="always")
    engine.warm(TEXT[:96], header="")
    moved = engine.generate("A question comes first. " + TEXT[:96] + " Then?", 4)
    assert moved.moved_tokens
    said = engine.encode("A question comes first. " + TEXT[:96] + " Then?") + moved.token_ids
    pinned = engine.pin_cached("talk", said, ttl=600)
    assert pinned.tokens == len(said) - 1  # the last token has no row yet
    assert engine.heal().conversations == 1
    (healed,) = engine.pins()
    assert healed.tokens == pinned.tokens
    assert {chunk["lineage"] for chunk in engine.chunks(99) if chunk["pinned"]} == {"exact"}
    assert engine.check_integrity() == []


def test_a_forgotten_text_is_on_no_tier(open_engine, tmp_path: Path) -> None:
    secret = "My password is a secret that nobody but me must ever read. "
    engine = open_engine()
    engine.generate(TEXT[:70] + secret + TEXT[:40], 4)
    engine.generate(secret + "What was it?", 4, cache_salt="other")
    engine.generate(TEXT[:70] + "Nothing of the kind.", 4)
    engine.flush()
    before = len(list((tmp_path / "kv").glob("??/*")))
    forgotten = engine.forget(secret)
    assert forgotten > 8
    assert len(list((tmp_path / "kv").glob("??/*"))) == before - forgotten
    assert engine.plan(TEXT[:70] + secret).cached_tokens <= 70
    assert engine.plan(TEXT[:70] + "Nothing").cached_tokens >= 64
    assert engine.plan(secret + "What", cache_salt="other").cached_tokens == 0
    engine.close()
    again = open_engine()
    assert again.plan(TEXT[:70] + secret).cached_tokens <= 70
    assert again.forget(secret) == 0


def test_clearing_empties_memory_and_disk(open_engine, tmp_path: Path) -> None:
    engine = open_engine()
    engine.generate(TEXT, 4)
    engine.flush()
    engine.clear()
    assert engine.cache_stats()["chunks"] == 0
    assert not list((tmp_path / "kv").glob("??/*"))
