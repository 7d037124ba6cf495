"""Requests that share rows: attending in two parts equals attending in one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvboost.model.execution import attention, partial_attention, shared_attention
from kvboost.model.execution import kv as kv_module
from kvboost.model.execution.attention import attend
from kvboost.model.execution.kv import KVPool, RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Segment

HEADS, KV_HEADS, DIM = 6, 2, 8
SHAPE = KVShape(1, KV_HEADS, DIM, torch.float32, torch.device("cpu"))


def filled(kv: RequestKV, seed: int) -> RequestKV:
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(seed)))
    return kv


def run(
    segments: list[Segment],
    query: torch.Tensor,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of packed segments whose fresh rows are in place."""
    fresh = [kv.layer(0, 0, one.end) for one in segments for kv in [one.kv]]
    rows = [one.position_ids(torch.device("cpu")) for one in segments]
    keys, values = (
        torch.cat([layer[half][:, :, ids] for layer, ids in zip(fresh, rows, strict=True)], 2)
        for half in (0, 1)
    )
    setattr(keys, attention.BATCH, (attention.Batch(segments), 0))
    options = {"scaling": 0.3, "sliding_window": window, "s_aux": sinks}
    return attend(torch.nn.Module(), query, keys, values, None, **options)[0]


def on_base(base: RequestKV, count: int, num_tokens: int, seed: int) -> RequestKV:
    kv = filled(RequestKV(base.shape, num_tokens), seed)
    kv.attach_prefix(base.share(count))
    return kv


def alone(kv: RequestKV, end: int) -> RequestKV:
    """The same rows in one buffer."""
    whole = RequestKV(kv.shape, end)
    whole.rows(0, end).copy_(kv.rows(0, end))
    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "window, sinks", [(None, None), (30, None), (1000, None), (None, torch.linspace(0, 4, HEADS))]
)
def test_attention_to_shared_rows_equals_attention_to_a_copy_of_them(
    window: int | None, sinks: torch.Tensor | None, dtype: torch.dtype
) -> None:
    shape = replace(SHAPE, dtype=dtype)
    first = filled(RequestKV(shape, 80), 1)
    second, third = on_base(first, 48, 32, 2), on_base(first, 48, 32, 3)
    other = filled(RequestKV(shape, 80), 4)
    pieces = [
        (first, range(60, 61)),  # decodes; its base is a prefix of its own buffer
        (second, range(48, 60)),  # the tail of its prompt, from the base on
        (third, range(52, 60)),  # a later slice
        (other, range(30, 31)),  # shares nothing
        (second, torch.tensor([49, 55])),  # gaps: attended to in one part
    ]
    query = torch.randn(1, HEADS, sum(len(at) for _, at in pieces), DIM, dtype=dtype)
    together = run(
        [Segment(kv, torch.zeros(len(at)), at) for kv, at in pieces], query, window, sinks
    )
    expected, start = [], 0
    for kv, at in pieces:
        own = query[:, :, start : start + len(at)]
        start += len(at)
        segment = Segment(alone(kv, int(at[-1]) + 1), torch.zeros(len(at)), at)
        expected.append(run([segment], own, window, sinks))
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    assert torch.allclose(together, torch.cat(expected, 1), atol=tolerance)


def test_all_requests_attend_to_the_shared_rows_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = filled(RequestKV(SHAPE, 80), 1)
    every = [first, *(on_base(first, 48, 32, seed) for seed in range(3))]
    calls: list[int] = []
    attend_part = partial_attention.attend_part

    def watched(query: torch.Tensor, keys: torch.Tensor, *rest: object) -> partial_attention.Part:
        calls.append(keys.shape[2])
        return attend_part(query, keys, *rest)

    for module in (kv_module, shared_attention):
        monkeypatch.setattr(module, "attend_part", watched)
    segments = [Segment(one, torch.zeros(1), range(60, 61)) for one in every]
    run(segments, torch.randn(1, HEADS, 4, DIM))
    assert sorted(calls) == [13, 13, 13, 13, 48]


def test_growing_does_not_move_rows_that_others_read() -> None:
    first = filled(RequestKV(SHAPE, 256), 1)
    second = on_base(first, 100, 20, 2)
    before = {kv: kv.rows(0, 120).clone() for kv in (first, second)}
    shared_data = first.data
    for kv in (first, second):
        kv.reserve(kv.capacity + 1)
        assert kv.start == 100
        assert torch.equal(kv.rows(0, 120), before[kv])
        assert torch.equal(kv.rows(90, 110), before[kv][:, :, :, 90:110])
    assert first.base is second.base and first.base.data is shared_data


def test_a_pool_does_not_lend_a_buffer_that_others_read() -> None:
    pool = KVPool(SHAPE)
    with pool.lend(300) as first:
        lent = pool.lend(320, first.share(256))
        second = lent.__enter__()
        assert second.start == 256 and second.data.shape[3] == 256 and second.capacity == 512
    with pool.lend(300) as third:
        assert third is not first and third.base is None
    lent.__exit__(None, None, None)
    with pool.lend(100) as again:
        assert again is second and again.base is None and again.start == 0


def test_every_request_shares_the_same_shorter_prefix() -> None:
    first = RequestKV(SHAPE, 256)
    base = first.share(200)
    longer = first.share(250)
    assert longer.count == 250 and first.base is longer
    assert first.share(200) is base and first.share(64) is first.share(64)
    second = on_base(first, 64, 32, 1)
    assert second.share(64) is second.base
