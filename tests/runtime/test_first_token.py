"""What the first token does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvboost.cache.lookup.hits import Hit
from support.prompts import EXACT, words
from support.tiny import make_engine, tiny_model

PROMPT = words(3, 120)


def test_the_eviction_order_hears_of_hits_after_the_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine(tiny_model("llama")) as engine:
        engine.generate(PROMPT, 1, EXACT, ignore_eos=True)
        store, paths = engine.runtime.store, []
        touch = store.touch

        def touching(*used: Sequence[Hit]) -> None:
            paths.extend(used)
            touch(*used)

        monkeypatch.setattr(store, "touch", touching)
        for keep in (True, False):
            stream = engine.stream([*PROMPT, 5, 6], 3, EXACT, ignore_eos=True, keep=keep)
            next(stream)
            assert stream.result.exact_tokens >= len(PROMPT) - 1 and paths == []
            stream.close()
            (path,) = paths
            assert path[-1].end >= len(PROMPT) - 1
            paths.clear()
        assert engine.check_integrity() == []


def test_chunks_of_the_fastest_tier_are_counted_as_its_hits() -> None:
    with make_engine(tiny_model("llama")) as engine:
        engine.generate(PROMPT, 1, EXACT, ignore_eos=True)
        tier = engine.runtime.store.fastest_tier
        before = engine.cache_stats()["tiers"][tier]["hits"]
        result = engine.generate([*PROMPT, 5, 6], 1, EXACT, ignore_eos=True)
        served = [span for span in result.reuse.spans if span.tier == tier]
        assert served and engine.cache_stats()["tiers"][tier]["hits"] == before + len(served)
