from __future__ import annotations

import pytest
import torch

from kvboost.model.execution import partial_attention

DIM = 8


def test_written_out_equals_the_kernel_in_any_number_of_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, keys = torch.randn(1, 2, 7, DIM), torch.randn(1, 2, 9, DIM)
    mask = torch.zeros(7, 9).masked_fill_(torch.ones(7, 9).triu(4).bool(), float("-inf"))
    for most in (partial_attention.MOST_WEIGHTS, 18):
        monkeypatch.setattr(partial_attention, "MOST_WEIGHTS", most)
        for one in (None, mask):
            ours = partial_attention._written_out(query, keys, keys, 0.3, one)
            kernel = partial_attention.attend_part(query, keys, keys, 0.3, one)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, kernel, strict=True))
