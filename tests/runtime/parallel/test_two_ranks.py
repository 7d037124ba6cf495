"""An engine over two processes gives the answers of one process, and reuses as much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import PLAIN, KVData
from kvboost.model.execution.kv import RequestKV
from kvboost.results import SpanKind
from kvboost.runtime.parallel.chunks import ShardedData, ShardedKV
from kvboost.runtime.parallel.follower import Follower
from kvboost.runtime.parallel.ranks import Ranks, open_ranks
from support.split_models import save_model, split_engine, whole_engine
from support.tiny import DEVICE, in_slices

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps. "
DOCUMENT = "Lighthouses are at the coast and shine at night for ships at sea. "
HEADER = "Some words before it. "
QUESTION = "What do they shine for?"
MODELS = {
    "llama": 1,
    "mixtral": 1,
    "gemma2": 1,
    "phi3": 2,  # transformers' plan gives every rank all heads of the attention
}
"""KV heads of a rank; these models have two."""

Make = Callable[..., KVBoost]
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="a GPU for each rank; two processes on a CPU show the same"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = open_ranks(2, torch.device("cpu"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def one(models: Path) -> Iterator[Make]:
    """Engines in this process."""
    opened: list[KVBoost] = []

    def make(name: str = "llama", **options: Any) -> KVBoost:
        opened.append(whole_engine(save_model(name, models), **options))
        return opened[-1]

    yield make
    for engine in opened:
        engine.close()


@pytest.fixture
def two(ranks: Ranks, models: Path) -> Iterator[Make]:
    """Engines over two ranks, one at a time."""
    opened: list[KVBoost] = []

    def make(name: str = "llama", **options: Any) -> KVBoost:
        for earlier in opened:
            earlier.close()
        opened.append(split_engine(ranks, save_model(name, models), **options))
        return opened[-1]

    yield make
    for engine in opened:
        assert engine.check_integrity() == []
        engine.close()


def parts_of(engine: KVBoost) -> dict[str, int]:
    """The chunks in memory, and the numbers that all ranks know them by."""
    residency = engine.runtime.store.holdings.residency
    found = {}
    for key in residency.in_memory():
        chunk = residency.ready(key)
        assert chunk is not None and isinstance(chunk.data, ShardedData)
        found[key] = chunk.data.number
    return found


def are_there(ranks: Ranks, numbers: list[int]) -> list[bool]:
    return [ranks.ask(Follower.has, number)[0] for number in numbers]


@pytest.mark.parametrize("name", MODELS)
def test_answers_and_hits_are_those_of_one_process(name: str, one: Make, two: Make) -> None:
    whole, split = one(name), two(name)
    assert whole.model.forward.shape.num_kv_heads == 2
    assert split.model.forward.shape.num_kv_heads == MODELS[name]
    assert split.model.fingerprint == whole.model.fingerprint
    for engine in (whole, split):
        engine.warm(DOCUMENT, header="")
    for prompt, kind in (
        (TEXT, None),
        (TEXT + "And more.", SpanKind.EXACT),
        (HEADER + DOCUMENT + QUESTION, SpanKind.MOVED),
    ):
        expected, given = (engine.generate(prompt, 6) for engine in (whole, split))
        assert given.token_ids == expected.token_ids
        assert given.reuse.spans == expected.reuse.spans
        assert given.reuse.recomputed == expected.reuse.recomputed
        if kind is not None:
            assert given.reuse.count(kind) > 32, "most of it was reused"


@pytest.mark.parametrize("strategy", ["auto", "cacheblend"])
def test_every_repair_is_that_of_one_process(strategy: str, one: Make, two: Make) -> None:
    """The ranks observe different heads, so rank 0 must add up what they have observed."""
    engines = one("qwen2"), two("qwen2")
    follow = [5, 6, 7]
    scores = []
    for engine in engines:
        engine.warm(DOCUMENT, header="")
        prompt = HEADER + DOCUMENT + QUESTION
        options = {"recompute_strategy": strategy, "reuse_moved": "always"}
        scores.append(engine.score(prompt, follow, **options))
    expected, given = scores
    assert given.reuse.count(SpanKind.MOVED) > 32
    assert given.reuse.recomputed == expected.reuse.recomputed
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-4, rtol=1e-4)


def test_copies_are_mixed_on_every_rank(
    ranks: Ranks, one: Make, two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[list[torch.Tensor]] = []
    scores = []
    for engine in (one("qwen2"), two("qwen2")):
        for before in ("One text. ", "Another, which is longer. ", QUESTION):
            engine.warm(before + DOCUMENT * 2, header="")
        mixed.append(mixed_rows(engine, ranks, monkeypatch))
        scores.append(engine.score(HEADER + DOCUMENT * 2, [5, 6], recompute_strategy="none"))
    expected, given = scores
    assert given.reuse.count(SpanKind.MOVED) > 96
    assert given.reuse.spans == expected.reuse.spans
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert sum(rows.shape[3] for rows in mixed[1]) > 2 * 96, "there are three copies"
    torch.testing.assert_close(mixed[1], mixed[0], atol=1e-4, rtol=1e-4)


def mixed_rows(engine: KVBoost, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows of all heads after each mixing, from now on."""
    mixed: list[torch.Tensor] = []
    packer = engine.runtime.backend.packer
    place = packer.place

    def recorded(hit: Hit, data: KVData, kv: RequestKV, share: float | None = None) -> None:
        place(hit, data, kv, share)
        if share is not None:
            heads = [kv.rows(hit.start, hit.end).clone()]
            if isinstance(kv, ShardedKV):
                copy = ranks.new_handle().number
                ranks.ask(Follower.pack, copy, kv.number, hit.start, hit.end, None, 0)
                given = ranks.ask(Follower.give, copy)
                heads += [part.tensors[PLAIN] for part in given if part is not None]
            mixed.append(torch.cat(heads, 2))

    monkeypatch.setattr(packer, "place", recorded)
    return mixed


def test_quantized_chunks(one: Make, two: Make) -> None:
    engines = one(kv_cache_bits=4), two(kv_cache_bits=4)
    for engine in engines:
        engine.warm(TEXT * 2, header="")
    expected, given = (engine.score(TEXT * 2 + QUESTION, [5, 6]) for engine in engines)
    assert given.reuse.count(SpanKind.EXACT) >= 96
    assert given.reuse.spans == expected.reuse.spans
    torch.testing.assert_close(given.logits, expected.logits, atol=1e-3, rtol=1e-3)


def test_batches_and_sampling(one: Make, two: Make) -> None:
    prompts = [TEXT, TEXT + QUESTION, HEADER + TEXT, DOCUMENT, QUESTION]
    each: Any = [{}, {"temperature": 0.8, "seed": 3}, {}, {"top_k": 5, "seed": 4}, {}]
    expected, given = (
        engine.generate_batch(prompts, 8, mode="prefix_cache", each=each)
        for engine in (one(), two())
    )
    assert [answer.token_ids for answer in given] == [answer.token_ids for answer in expected]


def test_probes_and_repairs_of_a_batch(
    one: Make, two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank tells what each hook of a forward has observed."""
    monkeypatch.setattr("kvboost.runtime.prefill.YIELD_AFTER_SECONDS", math.inf)
    prompts = [HEADER + DOCUMENT + QUESTION, TEXT, "Others. " + DOCUMENT + "Why at the coast?"]
    answers = []
    for engine in (one("qwen2"), two("qwen2")):
        engine.warm(DOCUMENT, header="")
        options: Any = {"reuse_moved": "always", "keep": False}
        answers.append(engine.generate_batch(prompts, 4, **options))
        assert 3 in engine.serving_stats()["batch_sizes"]
    for expected, given in zip(*answers, strict=True):
        assert given.reuse.recomputed == expected.reuse.recomputed
        assert given.token_ids == expected.token_ids
    assert all(answers[0][number].recomputed_tokens for number in (0, 2))


def test_several_threads_at_once(one: Make, two: Make) -> None:
    """Requests of other threads place rows and ask for chunks while a forward runs."""
    prompts = [HEADER + TEXT, TEXT + QUESTION, DOCUMENT + TEXT, HEADER + DOCUMENT] * 2
    whole, split = one(), two(max_cache_bytes="40KB")
    expected = [whole.generate(prompt, 6, mode="baseline").token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        given = pool.map(lambda prompt: split.generate(prompt, 6, mode="prefix_cache"), prompts)
        assert [answer.token_ids for answer in given] == expected
    assert split.cache_stats()["evicted"] > 0


def test_a_request_that_grows_and_a_prompt_in_slices(
    one: Make, two: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = in_slices(one(), 96), in_slices(two(), 96)
    split = engines[1].runtime
    monkeypatch.setattr(split, "rows_for", lambda request, *, batched: 8)
    with split.pool.lend(8) as kv:
        assert kv.capacity == 256
    expected, given = (engine.generate(TEXT * 5, 10) for engine in engines)
    assert given.token_ids == expected.token_ids
    with split.pool.lend(8) as kv:
        assert kv.capacity > 320, "the same buffer has grown"


def test_a_closed_stream_keeps_what_it_has_read(two: Make) -> None:
    engine = two()
    expected = engine.generate(TEXT + QUESTION, 12, mode="baseline").token_ids
    with engine.stream(TEXT + QUESTION, 12, ignore_eos=True) as stream:
        next(stream)
    assert stream.result.finish_reason == "cancelled"
    again = engine.generate(TEXT + QUESTION, 12)
    assert again.reuse.count(SpanKind.EXACT) > 64
    assert again.token_ids == expected


def test_other_ranks_release_what_rank_0_evicts(ranks: Ranks, two: Make) -> None:
    engine = two()
    engine.warm(TEXT, header="")
    size = engine.cache_stats()["hot_memory_mb"]
    first = parts_of(engine)
    assert are_there(ranks, list(first.values())) == [True] * len(first)
    engine = two(max_cache_bytes=int(size * 1.5e6))
    engine.warm(TEXT, header="")
    before = parts_of(engine)
    engine.warm(DOCUMENT + QUESTION, header="")
    after = parts_of(engine)
    gone = [before[key] for key in before.keys() - after.keys()]
    assert gone and are_there(ranks, gone) == [False] * len(gone)
    assert are_there(ranks, list(after.values())) == [True] * len(after)
    assert engine.cache_stats()["hot_memory_mb"] <= size * 1.5
    engine.clear()
    assert not any(are_there(ranks, list(after.values())))


def test_a_chunk_that_one_rank_has_lost_is_a_miss(ranks: Ranks, two: Make) -> None:
    engine = two()
    expected = engine.generate(TEXT + QUESTION, 8)
    parts = parts_of(engine)
    chunks = sorted(engine.chunks(), key=lambda chunk: int(chunk["position"]))
    ranks.cast(Follower.release, [parts[chunks[1]["key"]]])
    given = engine.generate(TEXT + QUESTION, 8)
    assert given.token_ids == expected.token_ids
    assert given.reuse.count(SpanKind.EXACT) == 16, "only the first chunk served"
    assert engine.cache_stats()["lost"] == 1
    again = engine.generate(TEXT + QUESTION, 8)
    assert again.reuse.count(SpanKind.EXACT) > 64, "it was read anew"


@pytest.mark.parametrize(
    ("writer", "tier", "bits"),
    [("one", "disk", 16), ("two", "disk", 8), ("two", "remote", 16), ("one", "remote", 8)],
)
def test_a_slow_tier_serves_any_number_of_ranks(
    writer: str, tier: str, bits: int, one: Make, two: Make, tmp_path: Path
) -> None:
    make, other = (one, two) if writer == "one" else (two, one)
    options: Any = {"kv_cache_bits": bits, "disk_cache_dir": tmp_path}
    if tier == "remote":
        url = {"remote_cache_url": tmp_path.as_uri(), "remote_cache_bytes": "1GiB"}
        options = {"kv_cache_bits": bits, **url}
    first = make("qwen3", **options)
    first.warm(DOCUMENT * 2, header="")
    first.close()
    reader = other("qwen3", **options)
    expected = one("qwen3", kv_cache_bits=bits)
    expected.warm(DOCUMENT * 2, header="")
    prompts = {SpanKind.EXACT: DOCUMENT * 2 + QUESTION}
    if tier == "disk":  # a remote folder finds no moved text
        prompts[SpanKind.MOVED] = HEADER + DOCUMENT * 2 + QUESTION
    for kind, prompt in prompts.items():
        wanted, given = (
            engine.score(prompt, [5, 6], recompute_strategy="none") for engine in (expected, reader)
        )
        assert given.reuse.count(kind) >= 96
        torch.testing.assert_close(given.logits, wanted.logits, atol=1e-3, rtol=1e-3)
    stats = reader.cache_stats()["tiers"][tier]
    assert stats["hits"] >= 6 and not any(stats["faults"].values())
