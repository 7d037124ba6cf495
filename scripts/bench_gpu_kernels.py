"""Our Triton kernels on a GPU: each is compared with torch first, then timed.

Attention of scattered rows is timed over several tiles and numbers of splits, next to
FlashAttention: vLLM's if it can be imported, which computes each run of consecutive rows as a
request of its own, or torch's with a mask. Times are medians on the GPU, taken by CUDA events around
a captured graph of several calls; "host" is what one call costs in Python. The last line is JSON.

    python scripts/bench_gpu_kernels.py [--workers 8] [--only attention,move,mass,shift]
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
from itertools import product
from typing import Any

import torch

from kvboost.model.kv import KVShape, RequestKV
from kvboost.model.triton.attention import attend
from kvboost.model.triton.mass import attention_mass
from kvboost.model.triton.move import MovedRows, StoredSpan, move
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.rows import PagedRows, Tile
from kvboost.model.triton.shift import ShiftPlan, shift
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift, Spans, row_weights

PAGE, DIM, RUN = 16, 128, 2
MODELS = {"7b": (28, 4), "1.5b": (12, 2)}
SIZES = [(1300, 8192), (5000, 32768), (350, 2048)]
TILES = [
    Tile(rows=128, keys=64, warps=8, stages=3),
    Tile(rows=128, keys=64, warps=8, stages=2),
    Tile(rows=128, keys=128, warps=8, stages=3),
    Tile(rows=64, keys=64, warps=4, stages=3),
    Tile(rows=64, keys=128, warps=4, stages=3),
]
SPLITS = [1, 2, 4]
LAYERS = 28
FREQUENCIES = 1e6 ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
DTYPE = torch.bfloat16
DEVICE = "cuda"
REPORT: dict[str, Any] = {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=8, help="processes that compile kernels")
    parser.add_argument("--only", default="attention,move,mass,shift")
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
    parts = {"attention": attention, "move": moves, "mass": masses, "shift": shifts}
    for name, part in parts.items():
        if name in chosen:
            part()
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

    def rows(self, tile: Tile | None = None, splits: int | None = None) -> PagedRows:
        return PagedRows.of(
            [self.positions],
            self.tables,
            page=PAGE,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dtype=DTYPE,
            tile=tile,
            splits=splits,
        )

    def attend(self, rows: PagedRows) -> torch.Tensor:
        return attend(self.query, self.pages, rows, DIM**-0.5)

    @property
    def flops(self) -> float:
        return 4.0 * DIM * self.heads * float((self.positions + 1).sum())


def compile_attention(model: str, tile: Tile, splits: int) -> None:
    case = Case.of(model, torch.arange(64), 64)
    case.attend(case.rows(tile, splits))
    torch.cuda.synchronize()


def make_pages(kv_heads: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages with tokens before heads in memory, as vLLM's default, and a table of them."""
    count = keys // PAGE + 8
    data = torch.randn(count, PAGE, kv_heads, 2 * DIM, device=DEVICE, dtype=DTYPE)
    table = torch.randperm(count, device=DEVICE)[: keys // PAGE].to(torch.int32)
    return data.transpose(1, 2), table


def scattered(rows: int, keys: int) -> torch.Tensor:
    """Runs of two rows, and the last one."""
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
        name = f"attention {model}, {rows} rows over {keys} keys"
        cases = {
            "scattered": Case.of(model, scattered(rows, keys), keys),
            "consecutive": Case.of(model, torch.arange(keys - rows, keys), keys),
        }
        report = REPORT[name] = {}
        print(name)
        for kind, case in cases.items():
            expected = expected_attention(case)
            default = case.rows()
            check(f"{name}, {kind}", case.attend(default), expected)
            times = {(default.tile, default.splits, "default"): gpu_us(case, default)}
            for tile, splits in product(TILES, SPLITS):
                plan = case.rows(tile, splits)
                check(f"{tile} {splits}", case.attend(plan), expected)
                times[tile, splits, ""] = gpu_us(case, plan)
            theirs_name, theirs = flash_attention(case)
            theirs_out = theirs()
            check(f"{name}, {kind}, {theirs_name}", theirs_out, expected)
            theirs_us = time_gpu(theirs)
            for (tile, splits, note), us in sorted(times.items(), key=lambda item: item[1])[:4]:
                print(f"  {kind:11} {describe(tile)}, {splits} splits {note:7} {us:8.1f} µs"
                      f" {case.flops / us / 1e6:6.0f} TFLOPS")  # fmt: skip
            ours_us = times[default.tile, default.splits, "default"]
            host = time_host(lambda case=case, plan=default: case.attend(plan))
            print(f"  {kind:11} default {ours_us:8.1f} µs, host {host:.0f} µs; {theirs_name} "
                  f"{theirs_us:8.1f} µs; ours takes {ours_us / theirs_us:.2f} of its time")  # fmt: skip
            best = min(times.items(), key=lambda item: item[1])
            report[kind] = {
                "default_us": ours_us,
                "best_us": best[1],
                "best": f"{describe(best[0][0])}, {best[0][1]} splits",
                "host_us": host,
                "theirs": theirs_name,
                "theirs_us": theirs_us,
            }


def describe(tile: Tile) -> str:
    return f"{tile.rows}x{tile.keys} {tile.warps} warps {tile.stages} stages"


def gpu_us(case: Case, rows: PagedRows) -> float:
    return time_gpu(lambda: case.attend(rows))


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
            return name, lambda: flash_attn_varlen_func(**options, fa_version=version)
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


def moves() -> None:
    """Eight passages of a prompt of 8,192 tokens, in another order, into all layers."""
    for model, (_, kv_heads) in MODELS.items():
        tokens, count = 8192, 8
        each = tokens // count
        layers = PagedLayers([make_pages(kv_heads, tokens)[0] for _ in range(LAYERS)])
        table = make_pages(kv_heads, tokens)[1]
        stored = torch.randn(2, LAYERS, kv_heads, tokens, DIM, device=DEVICE, dtype=DTYPE)
        spans = [
            StoredSpan(stored, at * each, each, (count - 1 - at) * each) for at in range(count)
        ]
        distances = [span.position - span.start for span in spans]
        cos, sin = (part[None] for part in rotations(torch.tensor(distances)))
        rows = MovedRows.of(spans, table, layers)
        move(rows, layers, (cos, sin))
        which = torch.arange(tokens, device=DEVICE) // each
        source = torch.cat([stored[:, :, :, s.start : s.start + each] for s in spans], 3)
        slots = rows.slots

        def torch_moves() -> None:
            for number, pages in enumerate(layers.pages):
                keys = rotate(source[0, number], cos[0, which], sin[0, which]).to(DTYPE)
                both = torch.cat([keys, source[1, number]], -1)
                pages[slots // PAGE, :, slots % PAGE] = both.transpose(0, 1)

        given = [pages.clone() for pages in layers.pages]
        torch_moves()
        for before, after in zip(given, layers.pages, strict=True):
            check("move", before, after, 0.04)  # the last bit of large numbers
        us, theirs = time_gpu(lambda: move(rows, layers, (cos, sin))), time_gpu(torch_moves, 1)
        planned = time_host(lambda: MovedRows.of(spans, table, layers))
        moved_bytes = 2 * stored.nbytes
        print(
            f"move {model}, {tokens} rows in {LAYERS} layers: {us:.0f} µs "
            f"({moved_bytes / us / 1e6:.2f} TB/s), plan {planned:.0f} µs on the host; "
            f"torch layer by layer {theirs:.0f} µs"
        )
        REPORT[f"move {model}"] = {"us": us, "plan_us": planned, "torch_us": theirs}


def masses() -> None:
    """The last 16 rows of a prompt over the rows before them."""
    for model, (rows, keys) in product(MODELS, [(16, 8192), (16, 32768)]):
        case = Case.of(model, torch.arange(keys - rows, keys), keys)
        absent = torch.rand(keys, device=DEVICE) < 0.1
        absent[keys - rows :] = False
        plan = case.rows()
        start = keys - rows

        def ours() -> torch.Tensor:
            return attention_mass(case.query, case.pages, plan, DIM**-0.5, start, absent=absent)

        def torchs() -> torch.Tensor:
            known = dense(case.pages, case.tables[0])[0].float()
            query = case.query.float().unflatten(1, (case.kv_heads, -1))
            scores = torch.einsum("rhgd,hkd->hgrk", query, known) * DIM**-0.5
            at = torch.arange(keys, device=DEVICE)
            hidden = (at > at[start:, None]) | absent
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            return weights.sum((0, 1, 2))[:start] / case.heads

        check("mass", ours(), torchs(), 1e-4)
        us, theirs, host = time_gpu(ours), time_gpu(torchs), time_host(ours)
        name = f"mass {model}, {rows} rows over {keys} keys"
        print(f"{name}: {us:.1f} µs, host {host:.0f} µs; torch {theirs:.1f} µs")
        REPORT[name] = {"us": us, "host_us": host, "torch_us": theirs}


def shifts() -> None:
    """Eight spans of which 15 % was recomputed, in one layer."""
    for model, (rows, keys) in product(MODELS, [(1300, 8192)]):
        _, kv_heads = MODELS[model]
        pages, table = make_pages(kv_heads, keys)
        positions = scattered(rows, keys)
        span_of = torch.arange(keys) * 8 // keys
        weights = row_weights(span_of[positions], torch.zeros(8))
        plan = ShiftPlan.of(positions, span_of, weights, table, PAGE)
        fresh = torch.randn(2, rows, kv_heads, DIM, device=DEVICE, dtype=DTYPE)
        frequencies = FREQUENCIES[None].expand(2, -1)
        rotation = Rotation(frequencies)
        at = rotation.cos_sin(1, torch.arange(keys, device=DEVICE))
        kv = RequestKV(KVShape(2, kv_heads, DIM, DTYPE, torch.device(DEVICE)), keys)
        kv.data[:, 1, :, :keys] = torch.stack(dense(pages, table))
        hook = Shift(
            rotation, positions.to(DEVICE), Spans(span_of.to(DEVICE), torch.zeros(8, device=DEVICE))
        )
        as_given = [part.transpose(0, 1)[None] for part in fresh]
        hook.on_fresh(1, kv, *as_given)
        shift(fresh[0], fresh[1], pages, plan, at)
        stale = torch.ones(keys, dtype=torch.bool)
        stale[positions] = False
        found = torch.stack(dense(pages, table))[:, :, stale.to(DEVICE)]
        check("shift", found, kv.data[:, 1, :, :keys][:, :, stale.to(DEVICE)], 0.06)
        us = time_gpu(lambda: shift(fresh[0], fresh[1], pages, plan, at))
        host = time_host(lambda: shift(fresh[0], fresh[1], pages, plan, at))
        theirs = time_gpu(lambda: hook.on_fresh(1, kv, *as_given))
        name = f"shift {model}, {rows} of {keys} rows"
        print(f"{name}: {us:.1f} µs a layer, host {host:.0f} µs; torch {theirs:.1f} µs")
        REPORT[name] = {"us": us, "host_us": host, "torch_us": theirs}


def rotations(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine ``[positions, pairs]``."""
    angles = positions.double()[:, None] * FREQUENCIES
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x, y = keys.float().chunk(2, -1)
    return torch.cat([x * cos - y * sin, y * cos + x * sin], -1)


# Time


def check(name: str, given: torch.Tensor, expected: torch.Tensor, limit: float = 0.02) -> None:
    error = float((given.float() - expected.float()).abs().max())
    if not error <= limit:
        raise SystemExit(f"{name}: differs from torch by {error}; at most {limit} is rounding")


def time_gpu(call: Callable[[], object], calls: int = 5, rounds: int = 7) -> float:
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


if __name__ == "__main__":
    main()
