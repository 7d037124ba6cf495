"""Known rows in place: one copy of them, or the mean of several."""

from __future__ import annotations

import pytest
import torch

from kvboost.reuse.request import BufferedRows
from support.prompts import words
from support.tiny import DEVICE, make_engine, tiny_model

PLAIN = {"recompute_strategy": "none", "keep": False, "ignore_eos": True}


@pytest.mark.skipif(DEVICE != "cpu", reason="it watches rows in buffers; a GPU has pages")
def test_copies_read_in_several_contexts_are_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    text, before = words(1, 96), [words(seed, 40) for seed in (2, 3, 4)]
    question = words(9, 24)
    shares: list[tuple[int, float | None]] = []
    placed: list[torch.Tensor] = []
    place = BufferedRows.place

    def noted(self, hit, data, share=None) -> None:
        place(self, hit, data, share)
        shares.append((hit.start, share))
        placed.append(self._kv.rows(40, 136).clone())

    monkeypatch.setattr(BufferedRows, "place", noted)
    with make_engine(tiny_model("llama"), reuse_moved="always", heal="off") as engine:
        for number, context in enumerate(before[:2], start=1):
            engine.warm([*context, *text])
            shares.clear()
            result = engine.generate([*before[2], *text, *question], 1, **PLAIN)
            assert result.moved_tokens >= 80
            mixed = {share for _, share in shares if share is not None}
            assert mixed == ({1 / number} if number > 1 else set())
        first = next(at for at, (_, share) in enumerate(shares) if share is not None)
        assert not torch.equal(placed[first - 1], placed[-1])
