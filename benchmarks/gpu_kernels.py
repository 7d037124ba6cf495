"""Our Triton kernels on a GPU: each is compared with torch first, then timed.

Attention of scattered rows is timed over several tiles and numbers of parts, next to
FlashAttention: vLLM's if it can be imported, which computes each run of consecutive rows as a
request of its own, or torch's with a mask. Times are medians on the GPU, taken by CUDA events
around a captured graph of several calls; "host" is what one call costs in Python. ``long`` compares
what attends for the rows of a long prompt: torch's kernels and ours; "first" is what a new shape
costs once. The last line is JSON.

    python -m benchmarks gpu_kernels [--workers 10] [--only long,attention,move,mass,shift]
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.paged.batch import attend_after
from kvboost.model.paged.long_rows import CUDNN, FLASH, LongKernel
from kvboost.model.triton.attention import attend
from kvboost.model.triton.dense import gather
from kvboost.model.triton.mass import attention_mass
from kvboost.model.triton.move import MovedRows, Source, StoredSpan, move
from kvboost.model.triton.pages import PagedLayers, slots_of
from kvboost.model.triton.rows import Tile, TiledRows, dense_tile
from kvboost.model.triton.shift import ShiftPlan, ShiftRows, shift
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import ERROR_WEIGHT, Shift, Spans

PAGE, DIM, RUN = 64, 128, 2
MODELS = {"7b": (28, 4), "1.5b": (12, 2)}
SIZES = [(1300, 8192), (5000, 32768), (350, 2048)]
TILES = [
    Tile(rows=128, keys=64, warps=8, stages=3),
    Tile(rows=128, keys=64, warps=8, stages=2),
    Tile(rows=128, keys=128, warps=8, stages=2),
    Tile(rows=64, keys=64, warps=4, stages=3),
    Tile(rows=64, keys=64, warps=4, stages=2),
]
PARTS = [1, 2, 4]
LONG = [(8192, 8192), (2048, 8192), (4096, 32768), (8192, 32768)]
"""Rows at the end of a sequence, and all its keys."""
LARGE_TILES = [*TILES[:3], Tile(rows=128, keys=128, warps=8, stages=3)]
LAYERS = 28
FREQUENCIES = 1e6 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
DTYPE = torch.bfloat16
DEVICE = "cuda"
MOST_ERROR = 0.02
REPORT: dict[str, Any] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=10, help="processes that compile kernels")
    parser.add_argument("--only", default="long,attention,move,mass,shift")
    options = parser.parse_args()
    chosen = options.only.split(",")
    started = time.perf_counter()
    if "attention" in chosen and options.workers > 1:
        jobs = list(product(MODELS, TILES, (1, 2)))
        with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
            pool.starmap(compile_attention, jobs, chunksize=1)
        print(f"compiled {len(jobs)} kernels in {time.perf_counter() - started:.0f} s", flush=True)
    torch.manual_seed(0)
    REPORT["gpu"] = torch.cuda.get_device_name()
    for model, (rows, keys) in product(MODELS, LONG) if "long" in chosen else ():
        name = f"long {model}, {rows} rows, {keys} keys"
        REPORT[name] = time_long(name, Case.of(model, torch.arange(keys - rows, keys), keys))
    if "attention" in chosen:
        attention()
    for model in MODELS:
        if "move" in chosen:
            REPORT[f"move {model}"] = time_move(model, 8192)
        for keys in (8192, 32768) if "mass" in chosen else ():
            REPORT[f"mass {model}, {keys} keys"] = time_mass(model, 16, keys)
        if "shift" in chosen:
            REPORT[f"shift {model}"] = time_shift(model, 1300, 8192)
    print(f"{time.perf_counter() - started:.0f} s")
    print(json.dumps(REPORT))


# Attention


@dataclass
class Case:
    """Rows over one request's pages."""

    heads: int
    kv_heads: int
    positions: torch.Tensor
    query: torch.Tensor
    pages: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def of(cls, model: str, positions: torch.Tensor, keys: int) -> Case:
        heads, kv_heads = MODELS[model]
        query = torch.randn(len(positions), heads, DIM, device=DEVICE, dtype=DTYPE)
        pages, table = make_pages(kv_heads, keys)
        return cls(heads, kv_heads, positions, query, pages, table[None])

    def rows(self, tile: Tile | None = None, parts: int | None = None) -> TiledRows:
        sizes: dict[str, Any] = {"page": PAGE, "heads": self.heads, "kv_heads": self.kv_heads}
        if tile is None:
            num_rows = self.heads // self.kv_heads * len(self.positions)
            tile = dense_tile(self.query.device, DTYPE, DIM, num_rows)
            tile = tile or Tile.over(self.pages, num_rows)
        return TiledRows.of(
            [self.positions], self.tables, tile=tile, parts=parts, dtype=DTYPE, **sizes
        )

    def attend(self, rows: TiledRows) -> torch.Tensor:
        return attend(self.query, self.pages, rows, DIM**-0.5)

    @property
    def flops(self) -> float:
        return 4.0 * DIM * self.heads * float((self.positions + 1).sum())


def compile_attention(model: str, tile: Tile, parts: int) -> None:
    case = Case.of(model, torch.arange(64), 64)
    case.attend(case.rows(tile, parts))
    torch.cuda.synchronize()


def make_pages(kv_heads: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages like those of our own engine, and a table of them."""
    count = keys // PAGE + 8
    pages = torch.randn(count, kv_heads, PAGE, 2 * DIM, device=DEVICE, dtype=DTYPE)
    table = torch.randperm(count, device=DEVICE)[: keys // PAGE].to(torch.int32)
    return pages, table


def scattered(rows: int, keys: int) -> torch.Tensor:
    """Runs of two rows."""
    cells = torch.randperm(keys // RUN - 1)[: rows // RUN] * RUN
    return (cells[:, None] + torch.arange(RUN)).flatten().sort().values


def expected_attention(case: Case) -> torch.Tensor:
    keys, values = dense(case.pages, case.tables[0])
    group = case.heads // case.kv_heads
    out = []
    for at in range(0, len(case.positions), 128):
        position = case.positions[at : at + 128].to(DEVICE)
        query = case.query[at : at + 128].float().unflatten(1, (case.kv_heads, group))
        scores = torch.einsum("rhgd,hkd->hgrk", query, keys.float()) * DIM**-0.5
        hidden = torch.arange(keys.shape[1], device=DEVICE) > position[:, None]
        weights = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        out.append(torch.einsum("hgrk,hkd->rhgd", weights, values.float()).flatten(1, 2))
    return torch.cat(out)


def dense(pages: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys and values, ``[kv_heads, rows, dim]``."""
    keys, values = pages[table.long()].transpose(0, 1).flatten(1, 2).chunk(2, -1)
    return keys, values


def attention() -> None:
    for model, (rows, keys) in product(MODELS, SIZES):
        for kind, positions in {
            "scattered": scattered(rows, keys),
            "consecutive": torch.arange(keys - rows, keys),
        }.items():
            name = f"attention {model}, {rows} {kind} rows over {keys} keys"
            REPORT[name] = time_attention(name, Case.of(model, positions, keys))


def time_attention(name: str, case: Case) -> dict[str, Any]:
    print(name)
    expected = expected_attention(case)
    default = case.rows()
    plans = [default, *(case.rows(tile, parts) for tile, parts in product(TILES, PARTS))]
    times = []
    for plan in plans:
        check(f"{name}, {describe(plan)}", case.attend(plan), expected)
        times.append(time_gpu(partial(case.attend, plan)))
    for us, at in sorted((us, at) for at, us in enumerate(times))[:4]:
        speed = case.flops / us / 1e6
        print(
            f"  {us:8.1f} µs {speed:5.0f} TFLOPS  {describe(plans[at])}{'' if at else ' (default)'}"
        )
    theirs_name, theirs = flash_attention(case)
    check(f"{name}, {theirs_name}", theirs(), expected)
    report: dict[str, Any] = {
        "us": times[0],
        "best_us": min(times),
        "best": describe(plans[times.index(min(times))]),
        "host_us": time_host(partial(case.attend, default)),
        "theirs": theirs_name,
        "theirs_us": time_gpu(theirs),
    }
    ratio = report["us"] / report["theirs_us"]
    line = (
        "  {us:8.1f} µs default, {host_us:.0f} µs on the host; {theirs} {theirs_us:.1f} µs; ratio"
    )
    print(line.format(**report), f"{ratio:.2f}", flush=True)
    return report


def time_long(name: str, case: Case) -> dict[str, Any]:
    """Every kernel for the last rows of a sequence, the keys of which are in pages."""
    print(name)
    rows, before = len(case.positions), int(case.positions[0])
    keys, values = (part.transpose(0, 1) for part in dense(case.pages, case.tables[0]))
    fresh = keys[before:].contiguous(), values[before:].contiguous()

    def in_parts(kernel: LongKernel) -> torch.Tensor:
        out = torch.empty_like(case.query)
        attend_after(kernel, case.query, fresh, case.pages, case.tables[0], before, DIM**-0.5, out)
        return out

    def whole(run: Callable[..., torch.Tensor]) -> torch.Tensor:
        all_rows = gather(case.pages, case.tables[0], before + rows)
        query = case.query.transpose(0, 1)[None]
        return run(query, *(part[None] for part in all_rows))[0].transpose(0, 1)

    def chosen_by_torch(
        query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        options: dict[str, Any] = {"is_causal": True}
        if before:
            options = {"attn_mask": causal_lower_right(rows, before + rows)}
        found = torch.nn.functional.scaled_dot_product_attention
        return found(query, keys, values, **options, scale=DIM**-0.5, enable_gqa=True)

    ways: dict[str, Callable[[], torch.Tensor]] = {
        "FlashAttention, one call": lambda: whole(
            lambda query, keys, values: FLASH.attend(query, keys, values, DIM**-0.5, True)[0]
        ),
        "torch's choice, one call": lambda: whole(chosen_by_torch),
        **{f"{kernel.name}, parts": partial(in_parts, kernel) for kernel in (FLASH, CUDNN)},
    }
    for tile in LARGE_TILES:
        plan = case.rows(tile, 1)
        ways[f"ours, {describe(plan)}"] = partial(case.attend, plan)
    expected = expected_attention(case)
    report: dict[str, Any] = {}
    for way, call in ways.items():
        try:
            started = time.perf_counter()
            found = call()
            torch.cuda.synchronize()
            first_ms = (time.perf_counter() - started) * 1e3
            check(f"{name}, {way}", found, expected)
            us = time_gpu(call)
        except Exception as error:
            print(f"  {way}: {type(error).__name__}: {str(error).partition('.')[0]}")
            continue
        report[way] = {"us": us, "tflops": case.flops / us / 1e6, "first_ms": first_ms}
        print(f"  {us:8.1f} µs {case.flops / us / 1e6:5.0f} TFLOPS, first {first_ms:.0f} ms: {way}")
    report["gather_us"] = time_gpu(lambda: gather(case.pages, case.tables[0], before + rows))
    print(f"  {report['gather_us']:8.1f} µs to gather all keys", flush=True)
    return report


def describe(plan: TiledRows) -> str:
    tile = plan.tile
    sizes = f"{tile.rows}x{tile.keys}, {tile.warps} warps, {tile.stages} stages"
    return f"{sizes}, up to {plan.most_parts} parts"


def flash_attention(case: Case) -> tuple[str, Callable[[], torch.Tensor]]:
    """The name and a call of what would compute these rows without our kernel."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return sdpa(case)
    ends = (case.positions.diff() != 1).nonzero()[:, 0] + 1
    cuts = torch.tensor([0, *ends.tolist(), len(case.positions)], dtype=torch.int32)
    lengths = case.positions[cuts[1:].long() - 1] + 1
    keys, values = (part.transpose(1, 2) for part in case.pages.chunk(2, -1))
    options = {
        "q": case.query,
        "k": keys,
        "v": values,
        "max_seqlen_q": int(cuts.diff().max()),
        "cu_seqlens_q": cuts.to(DEVICE),
        "max_seqlen_k": int(lengths.max()),
        "seqused_k": lengths.to(DEVICE, torch.int32),
        "block_table": case.tables.repeat(len(lengths), 1),
        "softmax_scale": DIM**-0.5,
        "causal": True,
        "out": torch.empty_like(case.query),
    }
    for version in (3, 2):
        try:
            flash_attn_varlen_func(**options, fa_version=version)
        except Exception as error:
            print(f"  FlashAttention {version}: {error!r}")
        else:
            name = f"FlashAttention {version} ({len(lengths)} runs)"
            return name, partial(flash_attn_varlen_func, **options, fa_version=version)
    return sdpa(case)


def sdpa(case: Case) -> tuple[str, Callable[[], torch.Tensor]]:
    keys, values = (part[None].contiguous() for part in dense(case.pages, case.tables[0]))
    query = case.query.transpose(0, 1)[None].contiguous()
    keys, values = (
        part.repeat_interleave(case.heads // case.kv_heads, 1) for part in (keys, values)
    )
    seen = torch.arange(keys.shape[2], device=DEVICE) <= case.positions.to(DEVICE)[:, None]

    def call() -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
        return out[0].transpose(0, 1)

    return "torch's SDPA with a mask", call


# Moved rows


def time_move(model: str, tokens: int, count: int = 8) -> dict[str, float]:
    """``count`` passages of a prompt, in another order, into all layers."""
    kv_heads, each = MODELS[model][1], tokens // count
    pages = [make_pages(kv_heads, tokens) for _ in range(LAYERS)]
    layers, table = PagedLayers([data for data, _ in pages]), pages[0][1]
    stored = torch.randn(2, LAYERS, kv_heads, tokens, DIM, device=DEVICE, dtype=DTYPE)
    spans = [
        StoredSpan(Source(stored), at * each, each, tokens - (at + 1) * each, at)
        for at in range(count)
    ]
    distances = torch.tensor([span.position - span.start for span in spans])
    cos, sin = (part[None] for part in rotations(distances))
    on_host = torch.stack([cos, sin]).cpu().numpy()
    (rows,) = MovedRows.of([spans], on_host, table, layers)
    row = torch.arange(each * count, device=DEVICE)
    cos_of, sin_of = (part[0, row // each] for part in (cos, sin))
    slots = slots_of(row + distances.to(DEVICE)[row // each], table, PAGE)

    def in_torch() -> None:
        for number, data in enumerate(layers.pages):
            x, y = stored[0, number].float().chunk(2, -1)
            keys = torch.cat([x * cos_of - y * sin_of, y * cos_of + x * sin_of], -1).to(DTYPE)
            both = torch.cat([keys, stored[1, number]], -1).transpose(0, 1)
            data[slots // PAGE, :, slots % PAGE] = both

    ours = partial(move, rows, layers)
    ours()
    given = [data.clone() for data in layers.pages]
    in_torch()
    for found, expected in zip(given, layers.pages, strict=True):
        check("move", found, expected)
    us = time_gpu(ours)
    report = {
        "us": us,
        "tb_per_s": 2 * stored.nbytes / us / 1e6,
        "host_us": time_host(ours),
        "plan_us": time_host(partial(MovedRows.of, [spans], on_host, table, layers)),
        "torch_us": time_gpu(in_torch, 1),
    }
    print(f"move {model}, {tokens} rows in {LAYERS} layers:", show(report))
    return report


def time_mass(model: str, rows: int, keys: int) -> dict[str, float]:
    """The last rows of a prompt over the rows before them."""
    start = keys - rows
    case = Case.of(model, torch.arange(start, keys), keys)
    absent = torch.rand(keys, device=DEVICE) < 0.1
    absent[start:] = False
    ones = torch.ones(1, rows, device=DEVICE)

    def in_torch() -> torch.Tensor:
        known = dense(case.pages, case.tables[0])[0].float()
        query = case.query.float().unflatten(1, (case.kv_heads, -1))
        scores = torch.einsum("rhgd,hkd->hgrk", query, known) * DIM**-0.5
        at = torch.arange(keys, device=DEVICE)
        hidden = (at > at[start:, None]) | absent
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return weights.sum((0, 1, 2))[None, :start] / case.heads

    ours = partial(
        attention_mass, case.query, case.pages, case.rows(), DIM**-0.5, start, ones, absent=absent
    )
    check("mass", ours(), in_torch())
    report = {"us": time_gpu(ours), "host_us": time_host(ours), "torch_us": time_gpu(in_torch)}
    print(f"mass {model}, {rows} rows over {keys} keys:", show(report))
    return report


def time_shift(model: str, rows: int, keys: int, count: int = 8) -> dict[str, float]:
    """Spans of which some rows were recomputed, in one layer."""
    kv_heads = MODELS[model][1]
    pages, table = make_pages(kv_heads, keys)
    bounds = [keys * number // count for number in range(count + 1)]
    positions, spans = (
        scattered(rows, keys),
        Spans.of([range(*two) for two in pairwise(bounds)], keys),
    )
    weights = spans.weights(positions.numpy())
    assert weights is not None
    plan = ShiftPlan.of(ShiftRows.of(positions.numpy(), spans.block_of, weights), table)
    fresh = torch.randn(2, rows, kv_heads, DIM, device=DEVICE, dtype=DTYPE)
    rotation = Rotation(FREQUENCIES.expand(2, -1))
    at = rotation.cos_sin(1, torch.arange(keys, device=DEVICE))
    kv = RequestKV(KVShape(2, kv_heads, DIM, DTYPE, torch.device(DEVICE)), keys)
    kv.data[:, 1, :, :keys] = torch.stack(dense(pages, table))
    hook = Shift(rotation, positions.to(DEVICE), spans)
    hook.kv = kv
    in_torch = partial(hook.on_fresh, 1, *fresh)
    ours = partial(shift, fresh[0], fresh[1], pages, plan, at, error_weight=ERROR_WEIGHT)
    in_torch()
    ours()
    stale = plan.stale[:, 1].long()
    found = torch.stack(dense(pages, table))[:, :, stale]
    check("shift", found, kv.data[:, 1][:, :, stale])
    report = {"us": time_gpu(ours), "host_us": time_host(ours), "torch_us": time_gpu(in_torch)}
    print(f"shift {model}, {rows} of {keys} rows, one layer:", show(report))
    return report


def rotations(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[positions, pairs]``."""
    angles = positions.double()[:, None] * FREQUENCIES
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


# Time


def show(report: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in report.items())


def check(name: str, given: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares vectors, those of the last dimension."""
    lengths = expected.float().norm(dim=-1).clamp(min=1e-3)
    error = float(((given.float() - expected.float()).norm(dim=-1) / lengths).max())
    if not error <= MOST_ERROR:
        raise SystemExit(f"{name}: differs from torch by {error:.3f}; {MOST_ERROR} is rounding")


def time_gpu(call: Callable[[], object], calls: int = 3, rounds: int = 7) -> float:
    """Microseconds of one call on the GPU."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls * 1e3)
    return statistics.median(times)


def time_host(call: Callable[[], object], calls: int = 20) -> float:
    """Microseconds of one call in Python."""
    torch.cuda.synchronize()
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)
