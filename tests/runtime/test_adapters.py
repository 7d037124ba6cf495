"""Adapters of an engine: names, content, cached text, and changes while requests run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvboost import KVBoost
from kvboost.cache.tiers.disk import DiskTier
from kvboost.errors import AdapterError, ForgetError, UnknownAdapterError
from kvboost.results import SpanKind
from support.adapters import merge, write_adapter
from support.tiny import make_engine, tiny_model

PROMPT = "The keeper of the lighthouse counts the ships that pass by the rocks every evening."
TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters that give other answers than the base model and one another."""
    place, model = tmp_path_factory.mktemp("adapters"), tiny_model("llama")
    return {
        name: write_adapter(place / name, model, seed=seed) for seed, name in enumerate("ab", 1)
    }


@pytest.fixture(scope="module")
def answers(folders: dict[str, Path]) -> dict[str | None, list[int]]:
    """The tokens of the base model, and of models with an adapter merged into their weights."""
    models = {None: tiny_model("llama")}
    models |= {name: merge(tiny_model("llama"), folders[name]) for name in folders}
    found = {}
    for name, model in models.items():
        with make_engine(model) as engine:
            found[name] = engine.generate(PROMPT, TOKENS).token_ids
    assert len(set(map(tuple, found.values()))) == 3
    return found


@pytest.fixture
def adapted(folders: dict[str, Path]) -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama")) as engine:
        for name, folder in folders.items():
            engine.load_adapter(name, folder)
        yield engine
        assert engine.check_integrity() == []


def test_a_batch_is_what_each_request_gives_alone(adapted: KVBoost, answers) -> None:
    names = ["b", None, "a", "b", "a"]
    together = adapted.generate_batch(
        [PROMPT] * 5, TOKENS, each=[{"adapter": name} for name in names], keep=False
    )
    assert [result.token_ids for result in together] == [answers[name] for name in names]
    assert max(adapted.serving_stats()["batch_sizes"]) == 5
    for name in ("a", "b", None):
        assert adapted.generate(PROMPT, TOKENS, adapter=name).token_ids == answers[name]
    chat = [{"role": "user", "content": PROMPT}]
    said = {name: adapted.chat(chat, TOKENS, adapter=name).token_ids for name in ("a", None)}
    assert said["a"] != said[None]


def test_cached_text_never_crosses_adapters(adapted: KVBoost, answers) -> None:
    """And it does serve the adapter that it was read with, or the test would show nothing."""
    for name in (None, "a", "b"):
        for mode in ("prefix_cache", "chunk_kv_reuse"):
            assert adapted.plan(PROMPT, mode, adapter=name).cached_tokens == 0
            assert adapted.plan("Once: " + PROMPT, mode, adapter=name).cached_tokens == 0
        adapted.warm(PROMPT, header="", adapter=name)
        assert adapted.plan(PROMPT, adapter=name).cached_tokens > 64
    for name in (None, "a", "b"):
        result = adapted.generate(PROMPT, TOKENS, adapter=name)
        assert result.reuse.cached_tokens > 64 and result.token_ids == answers[name]


def test_what_is_read_with_an_adapter_is_pinned_with_it(adapted: KVBoost) -> None:
    ids = adapted.encode(PROMPT)
    adapted.warm(ids, adapter="a")
    assert adapted.pin_cached("base", ids).tokens == 0
    assert adapted.pin_cached("b", ids, adapter="b").tokens == 0
    assert adapted.pin_cached("a", ids, adapter="a").tokens == len(ids)


def test_moved_text_is_reused_within_an_adapter_and_healed(adapted: KVBoost) -> None:
    adapted.warm(PROMPT, header="", adapter="a")
    moved = "Once upon a time: " + PROMPT
    result = adapted.generate(moved, 4, adapter="a", reuse_moved="always")
    assert result.reuse.count(SpanKind.MOVED) > 0
    assert adapted.heal().conversations == 1
    again = adapted.generate(moved, 4, "prefix_cache", adapter="a")
    exact = adapted.generate(moved, 4, "baseline", adapter="a")
    assert again.reuse.cached_tokens > 64 and again.token_ids == exact.token_ids
    verified = adapted.generate(
        "Twice upon a time: " + PROMPT, 4, adapter="b", exactness="verified"
    )
    baseline = adapted.generate("Twice upon a time: " + PROMPT, 4, "baseline", adapter="b")
    assert verified.token_ids == baseline.token_ids


def test_another_adapter_under_the_same_name(adapted: KVBoost, folders, answers) -> None:
    assert adapted.generate(PROMPT, TOKENS, adapter="a").token_ids == answers["a"]
    with pytest.raises(AdapterError, match="'a' is loaded already"):
        adapted.load_adapter("a", folders["b"])
    adapted.load_adapter("a", folders["b"], in_place=True)
    assert adapted.plan(PROMPT, adapter="a").cached_tokens == 0
    assert adapted.generate(PROMPT, TOKENS, adapter="a").token_ids == answers["b"]
    # The same content under another name finds what was read.
    assert adapted.plan(PROMPT, adapter="b").cached_tokens > 64
    adapted.unload_adapter("a")
    with pytest.raises(UnknownAdapterError, match="no adapter 'a'; loaded: 'b'"):
        adapted.generate(PROMPT, adapter="a")
    assert list(adapted.adapters()) == ["b"]


def test_an_adapter_that_is_replaced_during_its_requests(
    adapted: KVBoost, folders, answers
) -> None:
    """Requests finish with the adapter they began with; nothing of the old one is kept."""

    async def read(stream, after_first: Callable[[], object] = lambda: None) -> list[int]:
        async with stream:
            await anext(stream)
            after_first()
            async for _ in stream:
                pass
        return stream.result.token_ids

    async def run() -> list[list[int]]:
        def replace() -> None:
            adapted.load_adapter("a", folders["b"], in_place=True)
            later.append(asyncio.ensure_future(read(adapted.astream(PROMPT, TOKENS, adapter="a"))))

        later: list[asyncio.Future[list[int]]] = []
        first = await read(adapted.astream(PROMPT, TOKENS, adapter="a"), replace)
        return [first, *await asyncio.gather(*later)]

    assert asyncio.run(run()) == [answers["a"], answers["b"]]
    adapted.load_adapter("old", folders["a"])
    assert adapted.generate(PROMPT, TOKENS, adapter="old").token_ids == answers["a"]


def test_what_is_cached_of_an_unloaded_adapter_leaves_memory_and_stays_on_disk(
    open_engine: Callable[..., KVBoost], folders
) -> None:
    with open_engine() as engine:
        engine.load_adapter("a", folders["a"])
        engine.warm(PROMPT, header="", adapter="a")
        engine.warm("base text " * 6, header="")
        engine.flush()
        before = engine.cache_stats()["tiers"]
        engine.unload_adapter("a")
        after = engine.cache_stats()["tiers"]
        assert 0 < after["ram"]["chunks"] < before["ram"]["chunks"]
        assert after["disk"]["chunks"] == before["disk"]["chunks"] == before["ram"]["chunks"]
        engine.load_adapter("again", folders["a"])
        assert engine.plan(PROMPT, adapter="again").cached_tokens > 64
        assert engine.check_integrity() == []
        assert engine.forget_salt("") > 0
        assert engine.plan(PROMPT, adapter="again").cached_tokens == 0


def test_a_salt_is_forgotten_with_every_adapter_though_a_file_cannot_be_removed(
    open_engine: Callable[..., KVBoost], folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine() as engine:
        engine.load_adapter("a", folders["a"])
        engine.warm(PROMPT, header="", adapter="a")
        engine.warm(PROMPT, header="")
        engine.flush()
        with monkeypatch.context() as patch:
            patch.setattr(DiskTier, "delete", lambda tier, key: None)
            with pytest.raises(ForgetError):
                engine.forget_salt("")
        assert engine.cache_stats()["tiers"]["ram"]["chunks"] == 0


def test_an_activated_adapter_reads_its_context_with_the_base_model(
    adapted: KVBoost, tmp_path: Path, answers
) -> None:
    """Rows before the invocation are base rows, shared exactly with requests without it."""
    invocation = adapted.encode("Q:")
    folder = write_adapter(
        tmp_path / "c", tiny_model("llama"), seed=3, alora_invocation_tokens=invocation
    )
    assert adapted.load_adapter("c", folder).is_activated
    asked = PROMPT + " Q: how many?"
    expected = adapted.generate(asked, TOKENS, "baseline", adapter="c").token_ids
    assert expected != adapted.generate(asked, TOKENS, "baseline").token_ids
    adapted.warm(PROMPT, header="")
    cached = adapted.plan(PROMPT).cached_tokens
    result = adapted.generate(asked, TOKENS, adapter="c")
    assert result.reuse.count(SpanKind.EXACT) >= cached > 64 and result.token_ids == expected
    # Its own rows are not kept: they are not those of the base model.
    assert adapted.plan(asked).cached_tokens <= len(PROMPT) + 1
    again = adapted.generate(asked, TOKENS)
    assert again.token_ids == adapted.generate(asked, TOKENS, "baseline").token_ids
    # A prompt that does not invoke it is one of the base model.
    assert adapted.generate(PROMPT, TOKENS, adapter="c").token_ids == answers[None]


def test_names_are_checked(adapted: KVBoost, folders) -> None:
    for name in ("", 3, "x" * 300):
        with pytest.raises(AdapterError, match="must be text of 1 to 256"):
            adapted.load_adapter(name, folders["a"])
    with pytest.raises(UnknownAdapterError, match="no adapter 'z'"):
        adapted.unload_adapter("z")
