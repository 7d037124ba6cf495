"""The output head on our kernel equals torch's, row by row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvboost.model import native
from kvboost.model.execution.fast_layers import pack_layers
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.model.native import head
from kvboost.model.native.head import MOST_ROWS, Head, install_head, multiply_plain
from support.tiny import tiny_model

pytestmark = pytest.mark.skipif(
    not native.is_available(torch.float32), reason=f"{native.why_not(torch.float32)}"
)


@pytest.mark.parametrize("n", [4, 32, 101])
def test_the_head_multiplies_as_torch_does(n: int) -> None:
    weight = torch.randn(n, 48)
    for count in (1, 2, 3, 4, 5, 6, 7, 13):
        rows = torch.randn(count, 48)
        torch.testing.assert_close(
            multiply_plain(rows, weight), nn.functional.linear(rows, weight), rtol=1e-4, atol=1e-4
        )


def test_a_row_is_the_same_alone_and_beside_others() -> None:
    weight, rows = torch.randn(70, 64), torch.randn(MOST_ROWS, 64)
    together = multiply_plain(rows, weight)
    alone = torch.stack([multiply_plain(row, weight) for row in rows])
    assert torch.equal(together, alone)


def test_the_head_runs_few_rows_of_our_forwards_only(monkeypatch) -> None:
    model = tiny_model("llama", hidden_size=64, head_dim=32, intermediate_size=96)
    forward = Forward(model, packed=True, fast_layers=pack_layers(model))
    assert isinstance(model.lm_head.forward, Head)
    calls: list[int] = []
    monkeypatch.setattr(
        head, "multiply_plain", lambda rows, weight: calls.append(1) or rows @ weight.t()
    )
    kv = RequestKV(forward.shape, MOST_ROWS + 1)
    few = [Segment(kv, torch.arange(1, 6), range(5), 5)]
    forward(few)
    assert calls == [1]
    forward([Segment(kv, torch.arange(1, 6), range(5), 5, as_stock=True)])
    many = MOST_ROWS + 1
    forward([Segment(kv, torch.arange(1, many + 1), range(many), many)])
    assert calls == [1]


def test_other_heads_are_left_alone() -> None:
    model = tiny_model("llama")
    model.lm_head = nn.Linear(model.config.hidden_size, 64, bias=True)
    assert install_head(model) is None
    model.lm_head = nn.Linear(model.config.hidden_size, 64, bias=False, dtype=torch.float16)
    assert install_head(model) is None
