"""Long runs of consecutive rows: which rows torch's kernels compute, and that the result is the
same."""

from __future__ import annotations

import warnings

import pytest
import torch

from kvboost.model.execution.attention import Batch
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.model.paged import batch as paged_batch
from kvboost.model.paged import long_rows
from kvboost.model.paged.batch import PagedBatch
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.graphs import NoCapture
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.long_rows import FLASH, LongKernel, Part, long_kernels
from kvboost.model.paged.slab import PAGE, Slab
from support.paged_engines import TWO_LAYERS, forward_of, paged_engine, paged_kv
from support.tiny import DEVICE

CLOSE = 1e-4 if DEVICE == "cpu" else 1e-3


class Written:
    """Attention written out, in the place of torch's kernels; notes the shapes."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, int, bool]] = set()

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        causal: bool,
    ) -> Part:
        rows, count = query.shape[2], keys.shape[2]
        self.seen.add((rows, count, causal))
        group = query.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
        scores = query @ keys.transpose(2, 3) * scale
        if causal:
            assert rows == count
            hidden = torch.ones(rows, count, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(hidden, float("-inf"))
        return scores.softmax(-1) @ values, scores.logsumexp(-1)


def ids_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["their layers", "our layers", "sinks"])
def test_slices_of_a_prompt_are_cut_into_long_runs_and_the_rest(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = Written()
    monkeypatch.setattr(
        paged_batch, "long_kernels", lambda *_: (LongKernel("written", kernel, 16, 32),)
    )
    name = "gpt_oss" if kind == "sinks" else "llama"
    engine = paged_engine(monkeypatch, name, pages=False, sizes=TWO_LAYERS)
    forward = engine.model.forward
    slab = Slab(forward.shape, num_pages=9, num_requests=3)
    ids = ids_of(150)
    slices = [range(64), range(64, 100), range(100, 102), range(102, 150)]

    def read(kv: RequestKV) -> list[torch.Tensor]:
        other = Segment(RequestKV(forward.shape, 40), ids_of(40, 1), range(40))
        if isinstance(kv, PagedKV):
            other.kv = paged_kv(slab, 40)
        found = [forward([Segment(kv, ids[list(rows)], rows)]) for rows in slices[:-1]]
        return [*found, forward([Segment(kv, ids[102:], slices[-1]), other]), kv.rows(0, 150)]

    expected = read(RequestKV(forward.shape, 150))
    if kind == "our layers":
        layers = PagedForward(forward, slab, NoCapture()).layers
        assert layers is not None and len(layers) == 2
        kernel.seen.clear()
    for ours, theirs in zip(read(paged_kv(slab, 150)), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=CLOSE, rtol=CLOSE)
    assert kernel.seen == {
        (64, 64, True),
        (32, 32, True),  # [64, 96) of [64, 100), [112, 144) of [102, 150), the other's [0, 32)
        (32, 64, False),
        (32, 112, False),
    }


def test_our_layers_run_prompts_but_not_those_that_must_equal_stock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = paged_engine(monkeypatch, sizes=TWO_LAYERS)
    monkeypatch.setattr("kvboost.reuse.paged.forwards.SIZES", (32,))  # these have buffers
    ids = ids_of(40).tolist()
    batches: list[PagedBatch] = []
    init = PagedBatch.__init__
    monkeypatch.setattr(
        PagedBatch, "__init__", lambda self, given: (init(self, given), batches.append(self))[0]
    )
    calls: list[Batch] = []
    with engine:
        engine.generate(ids, 1, "prefix_cache", ignore_eos=True)  # makes the slab
        layers = forward_of(engine).layers
        assert layers is not None
        run = type(next(iter(layers._layers.values()))).__call__
        monkeypatch.setattr(
            "kvboost.model.paged.layers.FusedLayer.__call__",
            lambda self, *given: (calls.append(given[-1]), run(self, *given))[1],
        )
        batches.clear()
        engine.generate(ids_of(40, 1).tolist(), 1, "prefix_cache", ignore_eos=True)
        assert calls == [batches[0], batches[0]]  # two layers
        engine.generate(ids_of(40, 2).tolist(), 1, "baseline", ignore_eos=True)
        assert len(batches) == 2 and not batches[1].is_fused
        assert len(calls) == 2


def test_many_segments_are_one_launch_of_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = paged_engine(monkeypatch, pages=False)
    kernel = LongKernel("written", Written(), 1, 8)
    monkeypatch.setattr(paged_batch, "long_kernels", lambda *_: (kernel,))
    slab = Slab(engine.model.forward.shape, num_pages=9, num_requests=8)

    def batch_of(count: int) -> PagedBatch:
        segments = []
        for _ in range(count):
            kv = paged_kv(slab, PAGE)
            segments.append(Segment(kv, ids_of(20), range(20)))
            slab.release(kv.holding)
        return PagedBatch(segments)

    assert len(batch_of(4)._plan(None, None, 4).long) == 4
    work = batch_of(5)._plan(None, None, 4)
    assert not work.long and len(work.others) == 5
    assert not batch_of(1)._plan(None, 30.0, 4).long  # soft caps
    assert not batch_of(1)._plan(16, None, 4).long  # a window that hides keys


def test_no_kernel_where_torch_has_none() -> None:
    assert long_kernels(torch.device("cpu"), torch.bfloat16, 4, 2, 64) == ()
    assert long_kernels(torch.device(DEVICE), torch.float32, 4, 2, 64) == ()


def test_rows_on_the_grid() -> None:
    kernel = LongKernel("any", FLASH.attend, grid=16, least_rows=32)
    assert kernel.cut(0, 70) == range(64)
    assert kernel.cut(3, 70) == range(16, 64)
    assert kernel.cut(3, 47) is None
    assert FLASH.cut(3, 300) == range(3, 300)


@pytest.mark.parametrize("broken", [False, True], ids=["off", "failing"])
def test_cudnn_is_used_only_if_it_gives_what_flash_gives(
    broken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flash = Written()

    def cudnn(*given: object) -> Part:
        if broken:
            raise RuntimeError("no plan")
        out, sums = flash(*given)  # type: ignore[arg-type]
        return out * 1.2, sums

    monkeypatch.setattr(long_rows, "GRID", 32)
    monkeypatch.setattr(long_rows, "FLASH", LongKernel("flash", flash, 1, 1))
    monkeypatch.setattr(long_rows, "CUDNN", LongKernel("cudnn", flash, 32, 64))
    shape = (torch.device(DEVICE), torch.float32, 4, 2, 16)
    assert long_rows._agree(*shape)
    monkeypatch.setattr(long_rows, "CUDNN", LongKernel("cudnn", cudnn, 32, 64))
    assert not long_rows._agree(*shape)
    assert ("does not run here (no plan)" if broken else "is off by 0.2") in caplog.text


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_torch_has_kernels_on_gpus_and_slices_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = long_kernels(torch.device("cuda", 0), torch.bfloat16, 12, 2, 128)
    assert kernels[-1] is FLASH
    engine = paged_engine(monkeypatch, sizes={**TWO_LAYERS, "max_position_embeddings": 4096})
    forward = engine.model.forward
    with engine:
        engine.generate(ids_of(8).tolist(), 1, ignore_eos=True)
        with engine.runtime.pool.lend(2048) as kv:
            ids = ids_of(2048)
            forward([Segment(kv, ids, range(2048), 0)])
            torch.cuda.synchronize()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # it is a prototype, torch says
                torch.cuda.set_sync_debug_mode("error")
            try:
                forward([Segment(kv, ids[:1024], range(1024), 0)])
                forward([Segment(kv, ids[1024:], range(1024, 2048))])
            finally:
                torch.cuda.set_sync_debug_mode("default")
