"""Answers whose KV is larger than the GPU's memory: tokens per second, and what bus and RAM allow.

The model has the attention of a shape and narrow layers beside it, so that its weights fit; its KV
is random. A step attends to all rows: it cannot be faster than RAM, or the bus, carries them,
unless both work at once. transformers' offloaded cache runs the same steps with the same model.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import DynamicCache

from benchmarks.entries import BENCHMARKS
from benchmarks.shapes import DTYPES, SHAPES, device_for, number_tokenizer, random_model
from kvboost import EngineConfig, KVBoost, StockModel
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.kit.figures import draw_bars
from kvboost.bench.kit.goals import Goal, judge, keeps_to, reaches
from kvboost.bench.kit.machine import memory_fence
from kvboost.bench.kit.tables import ms, table
from kvboost.bench.texts.prompts import num_shared
from kvboost.cache.quantize import RowCodec
from kvboost.config import format_bytes, parse_bytes
from kvboost.errors import KVBoostError
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Segment
from kvboost.model.far.kv import FarKV
from kvboost.model.far.memory import copy_rows
from kvboost.model.far.place import in_file, on_host
from kvboost.model.far.store import FarStore
from kvboost.model.far.streamed import StreamedAttention

BOTH, STREAMED, ON_HOST, STOCK = "both", "streamed", "on the host", "transformers"
ALONE = {STREAMED: 0.0, ON_HOST: 1.0}
"""The share of far rows that the host attends to, for one method alone."""
NARROW, VOCABULARY = 1024, 4096
"""The width of gated layers and the number of tokens: with more, the weights would not fit."""
LEAST_STEPS, MOST_STEPS = 3, 12
FILLED = 4096
"""Rows that are made up at a time."""
CHECKED = 2048
"""Rows of the comparison with all rows near."""
ROUNDING = 0.1
"""The largest distance of logits, relative to the largest logit: in bfloat16."""
CHECKED_PROMPT = 6000
"""Tokens of the prompt that two engines answer."""
LEAST_ROWS = 384
"""Rows of the smaller engine: a third of the prompt, and not fewer than this."""
ANSWER = 8
GOAL_SHAPE, GOAL_TOKENS, GOAL_MEMORY = "7b", 256 * 1024, 8 << 30


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"tokens": 32768, "seconds": 20.0}

    shape: str = option("7b", "The shape of the attention; tiny runs on CPUs.", choices=[*SHAPES])
    tokens: int = option(GOAL_TOKENS, "Tokens of the context.", least=256)
    device_memory: str = option("8GiB", "The GPU memory that the process may use.")
    near: str = option("1GiB", "The part of it for the KV of the request.")
    bits: tuple[int, ...] = option((4,), "Also in so many bits, on a GPU.", choices=(8, 4))
    seconds: float = option(90.0, "About the most that the run takes.", least=1.0)
    ours_only: bool = option(False, "Do not measure transformers.")


def run(settings: Settings, bench: Bench) -> Report:
    device = device_for("far", [settings.shape])
    bench.describe(device, DTYPES[device])
    memory = parse_bytes(settings.device_memory, "device_memory")
    with memory_fence(torch.device(device, 0), memory):
        found = _Run(settings, bench, device).everything()
    problems = found.pop("problems")
    return Report(
        found,
        shown=_tables(found),
        goals=goals_of(settings, found),
        draw=lambda title: _draw(found, title),
        problems=problems,
    )


class _Run:
    """One run; what fails becomes a problem, and the rest still runs."""

    def __init__(self, settings: Settings, bench: Bench, device: str) -> None:
        self._settings, self._bench, self._device = settings, bench, device
        self._deadline = time.monotonic() + settings.seconds
        self._problems: list[str] = []
        torch.manual_seed(0)
        narrow = {"vocab_size": VOCABULARY, "max_position_embeddings": 1 << 20}
        if settings.shape != "tiny":
            narrow["intermediate_size"] = NARROW
        self._model = random_model(settings.shape, device, DTYPES[device], **narrow)
        self._forward = Forward(self._model, packed=True)
        self._shape = self._forward.uniform_shape
        self._figures: dict[str, Any] = {"tokens_per_s": {}}

    def everything(self) -> dict[str, Any]:
        settings, shape, near = self._settings, self._shape, parse_bytes(self._settings.near)
        place = on_host(shape, near) if self._device == "cuda" else in_file(shape, None)
        far = FarStore(shape, place, fits_bytes=0, near_bytes=near, far_bytes=1 << 50)
        self._figures |= {
            "tokens": settings.tokens,
            "far_bytes": settings.tokens * shape.row_bytes,
            "near_rows": far.near_rows,
        }
        self._attempt("far and near rows against near rows alone", lambda: self._compare(far))
        self._attempt("answers of engines", self._check_answers)
        with far.lend(settings.tokens + 2 * MOST_STEPS * len(ALONE) + FILLED) as kv:
            self._attempt(f"{settings.tokens:,} random rows", lambda: self._fill(kv))
            self._attempt("bandwidths", lambda: self._bandwidths(kv))
            self._attempt(f"decoding, {BOTH}", lambda: self._decode(kv, BOTH))
            if isinstance(far.attention, StreamedAttention):
                self._figures["host_share"] = far.attention.costs.host_share(1)
                for name, share in ALONE.items():
                    far.attention.costs = _Fixed(share)
                    self._attempt(f"decoding, {name}", partial(self._decode, kv, name))
            self._attempt("reading", lambda: self._read(kv))
        if self._device == "cuda":
            self._figures["peak_bytes"] = torch.cuda.max_memory_reserved()
            if not settings.ours_only:
                self._attempt(STOCK, self._decode_stock)
            for bits in settings.bits:
                self._attempt(f"{bits} bits", partial(self._decode_coded, bits, near))
        else:
            self._bench.say("transformers' offloaded cache needs a GPU: not measured")
        self._figures["problems"] = self._problems
        return self._figures

    def _attempt(self, name: str, part: Callable[[], object]) -> None:
        started = time.monotonic()
        if started > self._deadline:
            self._problems.append(f"{name}: left out, {self._settings.seconds:g} s are over")
            return
        try:
            part()
        except (KVBoostError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            self._problems.append(f"{name}: {type(error).__name__}: {error}")
        self._bench.say(f"{name}: {time.monotonic() - started:.1f} s")

    def _rows(self, count: int) -> torch.Tensor:
        size = (2, self._shape.num_layers, self._shape.num_kv_heads, count, self._shape.head_dim)
        return torch.randn(size, dtype=self._shape.dtype, device=self._device)

    def _fill(self, kv: FarKV) -> None:
        for start in range(0, self._settings.tokens, FILLED):
            end = min(start + FILLED, self._settings.tokens)
            with kv.filling(start, end) as rows:
                rows.copy_(self._rows(end - start))
        self._end = self._settings.tokens

    def _compare(self, far: FarStore) -> None:
        """The same rows, far and near: how far the logits are apart."""
        rows, tail = self._rows(CHECKED), 64
        near = RequestKV(self._shape, CHECKED + tail + 1)
        near.rows(0, CHECKED).copy_(rows)
        with far.lend(CHECKED + tail + 1) as kv:
            with kv.filling(0, CHECKED) as target:
                target.copy_(rows)
            apart = []
            for first, end in ((CHECKED, CHECKED + tail), (CHECKED + tail, CHECKED + tail + 1)):
                kv.prepare(first, end)
                ids = torch.arange(end - first)
                given = [
                    self._forward([Segment(some, ids, range(first, end))]).float()
                    for some in (kv, near)
                ]
                apart.append(float((given[0] - given[1]).abs().max() / given[1].abs().max()))
        self._figures["apart"] = max(apart)
        if not max(apart) < ROUNDING:
            self._problems.append(f"logits over far rows are {max(apart):.2f} apart, relative")

    def _check_answers(self) -> None:
        """The number of tokens that two answers have in common at their beginning, the second one
        over rows of the cache; how many tokens were cached for it; and how many requests had far
        rows."""
        count, row_bytes = min(CHECKED_PROMPT, self._settings.tokens), self._shape.row_bytes
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
        near, enough = max(LEAST_ROWS, count // 3) * row_bytes, 2 * count * row_bytes
        expected, _, _ = self._answers(prompt, max_kv_bytes=enough)
        given, cached, num_far = self._answers(prompt, max_kv_bytes=near, far_kv_bytes=enough)
        alike = min(num_shared(one, other) for one, other in zip(expected, given, strict=True))
        found = {"alike": alike, "of": ANSWER, "cached": cached, "requests": num_far}
        self._figures["answers"] = found
        if not num_far or not cached:
            self._problems.append(f"no request had far rows, or none a hit: {found}")

    def _answers(self, prompt: list[int], **options: Any) -> tuple[list[list[int]], int, int]:
        config = EngineConfig(
            graphs="off", heal="off", speculate="off", gpu_cache_bytes=0, **options
        )
        tokenizer = number_tokenizer(VOCABULARY)
        with KVBoost.from_model(self._model, tokenizer, config=config) as engine:
            given = [
                engine.generate(prompt, ANSWER, "prefix_cache", ignore_eos=True) for _ in range(2)
            ]
            far = engine.runtime.pool.far
            num_far = far.num_lent if isinstance(far, FarStore) else 0
            return [one.token_ids for one in given], given[1].exact_tokens, num_far

    def _step(self, kv: FarKV) -> None:
        kv.prepare(self._end, self._end + 1)
        ids = torch.tensor([self._end % VOCABULARY])
        logits = self._forward([Segment(kv, ids, range(self._end, self._end + 1))])
        logits.argmax(-1).tolist()
        self._end += 1

    def _decode(self, kv: FarKV, name: str) -> None:
        self._timed(name, lambda: self._step(kv))

    def _decode_coded(self, bits: int, near: int) -> None:
        place = on_host(self._shape, near, RowCodec(bits))
        far = FarStore(self._shape, place, fits_bytes=0, near_bytes=near, far_bytes=1 << 50)
        with far.lend(self._settings.tokens + FILLED) as kv:
            self._fill(kv)
            self._decode(kv, f"{bits} bits")

    def _timed(self, name: str, step: Callable[[], object], least: int = LEAST_STEPS) -> None:
        """Steps per second, as the median after two steps that warm up."""
        took: list[float] = []
        while len(took) < least + 1 or (len(took) < MOST_STEPS and sum(took) < 8):
            started = time.perf_counter()
            step()
            took.append(time.perf_counter() - started)
        measured = took[2:] if len(took) > 3 else took[1:]
        pace = self._figures["tokens_per_s"][name] = 1 / statistics.median(measured)
        self._bench.say(f"{name}: {pace:.2f} tokens/s")

    def _read(self, kv: FarKV) -> None:
        """A slice of a prompt after all of these rows."""
        count = min(kv.most_rows, FILLED // 2)
        kv.prepare(self._end, self._end + count)
        ids = torch.arange(count) % VOCABULARY
        segment = Segment(kv, ids, range(self._end, self._end + count))
        started = time.perf_counter()
        self._forward([segment]).argmax(-1).tolist()
        self._figures["read_tokens_per_s"] = count / (time.perf_counter() - started)

    def _bandwidths(self, kv: FarKV) -> None:
        """Bytes per second that RAM gives to the host, and the bus to the GPU, of far rows."""
        layers = [kv.far_data[:, layer] for layer in range(min(4, self._shape.num_layers))]
        self._figures["ram_bytes_per_s"] = _pace(
            lambda: [layer.flatten().view(torch.int32).amax() for layer in layers],
            sum(layer.nbytes for layer in layers),
        )
        if self._device == "cuda":
            rows = min(layers[0].shape[2], 65536)
            target = torch.empty_like(layers[0][:, :, :rows], device="cuda")
            self._figures["bus_bytes_per_s"] = _pace(
                lambda: _copy_all([layer[:, :, :rows] for layer in layers], target),
                len(layers) * target.nbytes,
            )
        self._figures["limits"] = {
            name: self._figures[name] / self._figures["far_bytes"]
            for name in ("ram_bytes_per_s", "bus_bytes_per_s")
            if name in self._figures
        }

    def _decode_stock(self) -> None:
        stock, shape = StockModel(self._model), self._shape
        self._forward.release()
        size = (1, shape.num_kv_heads, self._settings.tokens, shape.head_dim)
        rows = (torch.randn(size, dtype=shape.dtype, device=self._device) for _ in range(2))
        cache = _offloaded_cache(stock, *rows)
        self._timed(STOCK, lambda: stock.next_token([7], cache), least=1)


@torch.inference_mode()
def _offloaded_cache(stock: StockModel, keys: torch.Tensor, values: torch.Tensor) -> DynamicCache:
    """A cache that holds its layers on the host and copies each to the device and back, as
    transformers does it. All layers hold ``keys`` and ``values``, ``[1, kv_heads, tokens,
    head_dim]``."""
    cache = DynamicCache(config=stock.model.config, offloading=True)
    for layer in range(stock.model.config.num_hidden_layers):
        cache.update(keys, values, layer)
    return cache


class _Fixed:
    """Divides far rows in one way."""

    def __init__(self, share: float) -> None:
        self._share = share

    def observe_host(self, num_bytes: int, num_queries: int, seconds: float) -> None: ...

    def host_share(self, num_queries: int) -> float:
        return self._share


def _copy_all(sources: list[torch.Tensor], target: torch.Tensor) -> None:
    for source in sources:
        copy_rows(source, target)
    torch.cuda.synchronize()


def _pace(work: Callable[[], object], num_bytes: int) -> float:
    """Bytes per second, at the best of three."""
    took = []
    for _ in range(3):
        started = time.perf_counter()
        work()
        took.append(time.perf_counter() - started)
    return num_bytes / min(took)


def _tables(found: dict[str, Any]) -> list[Any]:
    limits = found.get("limits", {})
    named = {"the bus": limits.get("bus_bytes_per_s"), "RAM": limits.get("ram_bytes_per_s")}
    rows = [(name, f"{pace:.2f}", ms(1e3 / pace)) for name, pace in found["tokens_per_s"].items()]
    rows += [
        (f"limit of {name}", f"{pace:.2f}", ms(1e3 / pace)) for name, pace in named.items() if pace
    ]
    size = format_bytes(found["far_bytes"])
    title = f"decoding after {found['tokens']:,} tokens, {size} of KV"
    told = [table(title, ("attended",), ("tokens/s", "ms"), rows)]
    lines = []
    for name, form in (
        ("ram_bytes_per_s", "RAM gives {:.1f} GB/s"),
        ("bus_bytes_per_s", "the bus gives {:.1f} GB/s"),
    ):
        if name in found:
            lines.append(form.format(found[name] / 1e9))
    if "host_share" in found:
        lines.append(f"the host attended to {found['host_share']:.0%} of the rows")
    if "read_tokens_per_s" in found:
        lines.append(f"reading more: {found['read_tokens_per_s']:,.0f} tokens/s")
    if "apart" in found:
        lines.append(f"logits against near rows: {found['apart']:.1e} apart, relative")
    if "answers" in found:
        lines.append("answers alike: {alike} of {of} tokens".format(**found["answers"]))
    if "peak_bytes" in found:
        lines.append(f"peak of GPU memory: {format_bytes(found['peak_bytes'])}")
    return [*told, "; ".join(lines)]


def goals_of(settings: Settings, found: dict[str, Any]) -> list[Goal]:
    paces, limits = found["tokens_per_s"], found.get("limits", {})
    ours, stock = paces.get(BOTH), paces.get(STOCK)
    is_bounded = ours and "bus_bytes_per_s" in limits
    judged = [
        keeps_to(max(limits.values()) / ours if is_bounded else None, 1.3, "{:.2f} ×"),
        reaches(ours / stock if ours and stock else None, 2, "{:.1f} ×"),
    ]
    peak = found.get("peak_bytes")
    fence = parse_bytes(settings.device_memory)
    judged.append((None, "no GPU") if peak is None else (peak <= fence, format_bytes(peak)))
    is_asked = settings.shape == GOAL_SHAPE and settings.tokens >= GOAL_TOKENS
    is_another = not is_asked or fence > GOAL_MEMORY
    return judge(BENCHMARKS["far"].goals, judged, "another size" if is_another else None)


def _draw(found: dict[str, Any], title: str) -> Any:
    names = {"ram_bytes_per_s": "limit of RAM", "bus_bytes_per_s": "limit of the bus"}
    limits = {names[name]: pace for name, pace in found.get("limits", {}).items()}
    bars = {"tokens/s": found["tokens_per_s"] | limits}
    return draw_bars({f"{found['tokens']:,} tokens": bars}, title=title, y=("tokens/s",))
