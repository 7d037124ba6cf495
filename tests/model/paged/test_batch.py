"""A forward over pages gives what a forward over buffers gives."""

from __future__ import annotations

import pytest
import torch

from kvboost import KVBoost
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Segment
from kvboost.model.paged.batch import PagedBatch
from kvboost.model.paged.slab import PAGE, Slab
from support.paged_engines import TWO_LAYERS, paged_engine, paged_kv
from support.tiny import DEVICE

NAMES = ["llama", "gemma2", "mistral-window", "gemma3_text", "gpt_oss", "cohere", "gpt2"]
"""Grouped heads, soft caps, windows, layers of two kinds, sinks, pairs of neighbours, no
rotation."""
CLOSE = 1e-4 if DEVICE == "cpu" else 1e-3


def random_ids(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


class Recorder(Hook):
    """A hook that keeps what it sees of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.seen: list[torch.Tensor] = []

    def on_fresh(self, layer, keys, values) -> None:
        if layer == self.layer:
            self.seen += [keys.clone(), *(part.clone() for part in self.kv.layer(layer, 0, 20))]

    def on_query(self, layer, query, rules) -> None:
        if layer == self.layer:
            self.seen += [query.clone(), *(part.clone() for part in self.kv.layer(layer, 0, 60))]


def kvs_of(engine: KVBoost, paged: bool) -> list[RequestKV]:
    forward = engine.model.forward
    if not paged:
        return [RequestKV(forward.shape, 80) for _ in range(3)]
    slab = Slab(forward.shape, num_pages=24, num_requests=4)
    kvs: list[RequestKV] = [paged_kv(slab, PAGE) for _ in range(3)]
    for kv in kvs:
        kv.reserve(80)  # their pages alternate
    return kvs


def run_all(engine: KVBoost, paged: bool) -> list[torch.Tensor]:
    """Whole prompts, a tail, rows with gaps, a decoded row, absent rows and a hook."""
    forward = engine.model.forward
    first, second, third = kvs_of(engine, paged)
    ids = [random_ids(70, seed) for seed in range(3)]
    found = [
        forward(
            [Segment(first, ids[0][:60], range(60), 3), Segment(second, ids[1][:33], range(33), 1)]
        )
    ]
    forward([Segment(third, ids[2], range(70), 0)])
    gaps = torch.tensor([3, 20, 31, 32, 50, 69])
    found.append(
        forward(
            [
                Segment(first, ids[0][60:67], range(60, 67), 2),
                Segment(second, ids[1][33:34], range(33, 34)),
                Segment(third, ids[0][gaps], gaps, 3),
            ]
        )
    )
    absent = torch.zeros(70, dtype=torch.bool, device=DEVICE)
    absent[5:20] = True
    hook = Recorder(1)
    tail = torch.arange(60, 70)
    forward([Segment(third, ids[2][60:], tail, 0, hook=hook, until=1, absent=absent)])
    assert hook.seen
    found += hook.seen
    found.append(forward([Segment(third, ids[2][60:], tail, 2, absent=absent)]))
    return [*found, third.rows(0, 70), first.rows(0, 67)]


@pytest.mark.parametrize("name", NAMES)
def test_pages_give_what_buffers_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged_engine(monkeypatch, name, pages=False, sizes=TWO_LAYERS)
    made = []
    init = PagedBatch.__init__
    monkeypatch.setattr(
        PagedBatch, "__init__", lambda self, given: (made.append(self), init(self, given))[1]
    )
    expected = run_all(engine, paged=False)
    assert not made
    given = run_all(engine, paged=True)
    assert len(made) == 5
    for ours, theirs in zip(given, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=CLOSE, rtol=CLOSE)


def test_rows_that_others_read_are_not_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged_engine(monkeypatch, pages=False)
    first, *_ = kvs_of(engine, paged=True)
    first.share(PAGE)
    with pytest.raises(RuntimeError, match=r"rows \[30, 33\) are not this request's own"):
        engine.model.forward([Segment(first, random_ids(3, 0), range(30, 33))])


def test_buffers_and_pages_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slab that is full leaves some requests with buffers; they run beside the others."""
    engine = paged_engine(monkeypatch, pages=False)
    ids = random_ids(40, 0)
    kvs = [kvs_of(engine, paged)[0] for paged in (True, False)]
    given = engine.model.forward([Segment(kv, ids, range(40)) for kv in kvs])
    assert torch.allclose(given[0], given[1], atol=CLOSE)
