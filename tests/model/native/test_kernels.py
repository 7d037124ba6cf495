"""Our attention against torch's, over everything a batch may hold."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.execution import attention
from kvboost.model.execution.attention import Batch, attend
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.segment import Segment
from kvboost.model.native.kernels import Kernels
from support.kernel_forms import CPU, close, each_dtype

LAYERS, KV_HEADS = 2, 2


def shape_of(dim: int, dtype: torch.dtype) -> KVShape:
    return KVShape(LAYERS, KV_HEADS, dim, dtype, CPU)


def filled(shape: KVShape, num_tokens: int, seed: int) -> RequestKV:
    kv = RequestKV(shape, num_tokens)
    kv.data.copy_(torch.randn(kv.data.shape, generator=torch.Generator().manual_seed(seed)))
    return kv


def segment(kv: RequestKV, positions: range | list[int], absent: range | None = None) -> Segment:
    at = positions if isinstance(positions, range) else torch.tensor(positions)
    hidden = None
    if absent is not None:
        hidden = torch.zeros(int(at[-1]) + 1, dtype=torch.bool)
        hidden[absent.start : absent.stop] = True
    return Segment(kv, torch.zeros(len(at), dtype=torch.long), at, absent=hidden)


def run(
    segments: list[Segment], kernels: Kernels | None, groups: int, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Writes fresh rows in layer 1; returns its attention."""
    torch.manual_seed(1)
    total, shape = sum(map(len, segments)), segments[0].kv.shape
    dim, dtype = shape.head_dim, shape.dtype
    # As in a model: values are a view of rows that hold one head after the other.
    query, keys = (
        torch.randn(1, heads, total, dim).to(dtype) for heads in (KV_HEADS * groups, KV_HEADS)
    )
    values = torch.randn(1, total, KV_HEADS, dim).to(dtype).transpose(1, 2)
    batch = Batch(segments, kernels)
    batch.write(1, keys, values)
    setattr(keys, attention.BATCH, (batch, 1))
    return attend(torch.nn.Module(), query, keys, values, None, scaling=0.2, s_aux=sinks)[0]


def batch_of(name: str, shape: KVShape) -> list[Segment]:
    """The same batch on every call."""
    if name == "shared":
        first = filled(shape, 300, 1)
        base = first.share(192)
        others = [filled(shape, 80, seed) for seed in (2, 3)]
        for other in others:
            other.attach_prefix(base)
        rows = [range(250, 251), range(192, 230), range(260, 261)]
        return [segment(kv, at) for kv, at in zip([first, *others], rows, strict=True)]
    if name == "one on shared rows":
        kv = filled(shape, 80, 2)
        kv.attach_prefix(filled(shape, 300, 1).share(128))
        return [segment(kv, range(150, 153))]
    kvs = [filled(shape, 900, seed) for seed in range(4)]
    return {
        "decode": [
            segment(kv, range(p, p + 1)) for kv, p in zip(kvs, (0, 63, 64, 800), strict=True)
        ],
        "one long": [segment(kvs[0], range(899, 900))],
        "whole": [segment(kvs[0], range(200)), segment(kvs[1], range(5, 6))],
        "gaps": [segment(kvs[0], [3, 4, 70, 131, 500, 501, 899]), segment(kvs[1], range(9, 40))],
        "many rows": [segment(kvs[0], range(500, 900))],
        "absent": [segment(kvs[0], [10, 300, 301, 640], absent=range(64, 290))],
    }[name]


NAMES = [
    *("decode", "one long", "whole", "gaps", "many rows", "absent"),
    *("shared", "one on shared rows"),
]


@each_dtype
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "groups"), [(32, 1), (64, 3), (128, 4), (96, 2)])
def test_attends_and_writes_as_torch_does(
    dtype: torch.dtype, name: str, dim: int, groups: int
) -> None:
    shape = shape_of(dim, dtype)
    kernels = Kernels.for_shape(shape)
    assert kernels is not None
    ours, theirs = batch_of(name, shape), batch_of(name, shape)
    sinks = torch.linspace(-1, 4, KV_HEADS * groups).to(dtype) if groups > 2 else None
    given, expected = run(ours, kernels, groups, sinks), run(theirs, None, groups, sinks)
    assert given.shape == expected.shape
    assert close(given, expected, 6)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.kv.data, other.kv.data)


@each_dtype
def test_scores_of_any_size(dtype: torch.dtype) -> None:
    """Rows whose by far highest score comes late, and rows whose scores are equal."""
    shape = shape_of(64, dtype)
    kv = filled(shape, 600, 1)
    kv.data[0, 1] *= torch.linspace(0, 40, kv.data.shape[3])[:, None]
    other = RequestKV(shape, 600)
    other.data.copy_(kv.data)
    kernels = Kernels.for_shape(shape)
    given = run([segment(kv, range(300, 560))], kernels, 3)
    expected = run([segment(other, range(300, 560))], None, 3)
    assert torch.isfinite(given).all()
    assert close(given, expected, 5)


@each_dtype
def test_torchs_default_dtype_does_not_matter(dtype: torch.dtype) -> None:
    """Loading another model changes it for the whole process for a while."""
    shape = shape_of(64, dtype)
    expected = run(batch_of("shared", shape), Kernels.for_shape(shape), 3)
    batch = batch_of("shared", shape)
    torch.set_default_dtype(torch.float64)
    try:
        given = run(batch, Kernels.for_shape(shape), 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert given.dtype == dtype
    assert torch.isfinite(given).all() and given.shape == expected.shape


@each_dtype
def test_rows_that_are_not_the_requests_own_are_refused(dtype: torch.dtype) -> None:
    shape = shape_of(64, dtype)
    kv = filled(shape, 100, 1)
    with pytest.raises(RuntimeError, match="rows \\[200, 900\\) are not this request's own"):
        run([segment(kv, range(200, 900))], Kernels.for_shape(shape), 3)
    kv.share(64)
    with pytest.raises(RuntimeError, match="has \\[64,"):
        run([segment(kv, range(60, 70))], Kernels.for_shape(shape), 3)


@each_dtype
@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 32), (2, 7)])
def test_unusual_groups_of_heads(dtype: torch.dtype, kv_heads: int, groups: int) -> None:
    shape = KVShape(LAYERS, kv_heads, 256, dtype, CPU)
    query = torch.randn(1, kv_heads * groups, 3, 256).to(dtype)
    kv = filled(shape, 256, 1)
    one = segment(kv, range(150, 153))
    kernels = Kernels.for_shape(shape)
    assert kernels is not None
    given = kernels.attend(Batch([one], kernels).plan, 1, query, 0.1)
    keys, values = (part[0].float().repeat_interleave(groups, 0) for part in kv.layer(1, 0, 153))
    scores = query[0].float() @ keys.transpose(1, 2) * 0.1
    scores = scores.masked_fill(torch.arange(153) > torch.arange(150, 153)[:, None], -torch.inf)
    expected = (scores.softmax(-1) @ values).transpose(0, 1)[None]
    assert close(given, expected, 6)


@each_dtype
def test_rows_that_were_never_written_are_never_read(dtype: torch.dtype) -> None:
    shape = shape_of(64, dtype)
    kv = filled(shape, 256, 1)
    kv.data[:, :, :, 101:] = float("nan")
    given = run([segment(kv, range(80, 101))], Kernels.for_shape(shape), 3)
    assert torch.isfinite(given).all()


@each_dtype
def test_many_threads_give_what_one_gives(dtype: torch.dtype) -> None:
    shape = shape_of(64, dtype)
    expected = run(batch_of("shared", shape), Kernels.for_shape(shape), 3)
    torch.set_num_threads(3)
    try:
        given = run(batch_of("shared", shape), Kernels.for_shape(shape), 3)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(given, expected)


@pytest.mark.parametrize(
    "other",
    [
        KVShape(1, 2, 64, torch.float16, CPU),
        *(
            KVShape(1, 2, dim, dtype, torch.device(device))
            for dtype in (torch.float32, torch.bfloat16)
            for dim, device in ((80, "cpu"), (512, "cpu"), (64, "meta"))
        ),
    ],
    ids=str,
)
def test_torch_serves_other_shapes(other: KVShape) -> None:
    assert Kernels.for_shape(other) is None
