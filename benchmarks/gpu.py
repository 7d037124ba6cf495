"""KVBoost on a GPU against vLLM and transformers: reading, known and moved text, and decoding.

Models have random weights. All contenders run in one command on the same card, one after the other:
vLLM first, in a process of its own. Times are taken from outside: to the first token, or the
difference between a long and a short answer divided by the tokens between them.
"""

from __future__ import annotations

import copy
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from rich.console import RenderableType

from benchmarks.entries import BENCHMARKS
from benchmarks.shapes import (
    DTYPES,
    EXPERTS,
    SHAPES,
    device_for,
    number_tokenizer,
    pack_randomly,
    random_model,
    step_bytes,
)
from benchmarks.vllm_connector import ALONE, HEADER, PASSAGES, QUESTION, TOGETHER
from benchmarks.vllm_connector import random_tokens as tokens_of
from benchmarks.vllm_runs import Place, run_worker
from kvboost import KVBoost, StockModel
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import ROUNDS, Bench, Report, option
from kvboost.bench.kit.goals import Goal, judge, keeps_to
from kvboost.bench.kit.tables import ms, table
from kvboost.bench.kit.timing import Contender, interleave, take_turns
from kvboost.config import DEFAULT_RATIO
from kvboost.errors import KVBoostError
from kvboost.model.loading.machine import copy_bandwidth
from kvboost.model.quantized.layers import weights_of

OURS, VLLM, STOCK, BATCHING = "KVBoost", "vLLM", "transformers", "continuous batching"
READ, KNOWN, IN_RAM, ON_DISK, MOVED = "new", "known", "known, RAM", "known, disk", "moved"
STEP = "step"
AGAINST = {IN_RAM: READ, ON_DISK: READ}
"""The times to compare others with, if not with the same: vLLM would have to read the text."""
GOALS: tuple[tuple[str | None, str, int, float], ...] = (
    (None, STEP, 1, 1.15),
    (None, STEP, 64, 1.25),
    (None, READ, 8192, 1.1),
    (None, KNOWN, 8192, 1.1),
    ("7b", IN_RAM, 8192, 0.15),
    ("7b", MOVED, 8192, 0.30),
    ("1.5b", MOVED, 8192, 0.45),
    (None, MOVED, 32768, 0.25),
    ("7b", MOVED, 2048, 0.6),
)
"""Shape (any if None), what, at how many tokens or requests, and the most that it may take as a
share of vLLM's time; in the order of the benchmark's goals."""
IN_MXFP4 = "gpt-oss-20b"
"""The shape that ``--mxfp4`` is for."""
SHORT, LONG = 16, 80
"""Tokens of the two answers whose difference is measured."""
DOCUMENTS = 3
CACHE = 8 << 30

Times = dict[str, dict[int, float]]
"""Milliseconds by what was done and at how many tokens or requests."""


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"lengths": (8192,), "requests": (1, 64), "rounds": 2, "ours_only": True}

    shapes: tuple[str, ...] = option(
        ("1.5b", "7b"),
        "Shapes of models; tiny runs without a GPU.",
        "shape",
        choices=(*SHAPES, *EXPERTS),
    )
    lengths: tuple[int, ...] = option((2048, 8192, 32768), "Prompt tokens.", "tokens", least=256)
    requests: tuple[int, ...] = option((1, 8, 32, 64), "Requests that decode together.", least=1)
    ratio: float = option(
        DEFAULT_RATIO, "The share of moved rows that is recomputed.", least=0.0, most=1.0
    )
    rounds: int = option(5, ROUNDS, least=1, most=50)
    vllm: str | None = option(None, "A Python that has vLLM: it runs there too.")
    ours_only: bool = option(False, "Measure neither transformers nor its continuous batching.")
    mxfp4: bool = option(
        False, "KVBoost alone has experts in MXFP4, of the shape gpt-oss-20b; vLLM in bfloat16."
    )
    profile: bool = option(False, "Also show the kernels of reading and of steps.")


def run(settings: Settings, bench: Bench) -> Report:
    device = device_for("gpu", settings.shapes)
    if settings.mxfp4 and set(settings.shapes) != {IN_MXFP4}:
        raise KVBoostError(f"--mxfp4 is for --shape {IN_MXFP4}, not {', '.join(settings.shapes)}")
    bench.describe(device, DTYPES[device])
    problems: list[str] = []
    found = {shape: _measure(shape, device, settings, bench, problems) for shape in settings.shapes}
    return _report(found, problems)


def _measure(
    shape: str, device: str, settings: Settings, bench: Bench, problems: list[str]
) -> dict[str, Any]:
    """Every contender's times. One that fails is a problem, and the others still run."""
    times: dict[str, Times] = {}

    def attempt(name: str, part: Callable[[Times], object]) -> None:
        started = time.monotonic()
        try:
            part(times.setdefault(name.partition(":")[0], {}))
        except (KVBoostError, RuntimeError, ValueError) as error:
            problems.append(f"{shape}, {name}: {type(error).__name__}: {error}")
        bench.say(f"{shape}, {name}: {time.monotonic() - started:.0f} s")

    if settings.vllm is not None:
        attempt(VLLM, partial(_vllm, settings, bench, shape))
    found: dict[str, Any] = {"times": times, "notes": []}
    attempt(f"{OURS}: the model", lambda _: found.update(model=_model(shape, device, settings)))
    if (model := found.pop("model", None)) is None:
        return found
    ours = Ours(model, settings, bench)
    attempt(f"{OURS}: GPU memory", ours.in_gpu_memory)
    attempt(f"{OURS}: RAM", ours.in_ram)
    attempt(f"{OURS}: disk", ours.on_disk)
    found["weights"] = weights_of(model)
    if not settings.ours_only and not settings.mxfp4:  # transformers would expand the experts
        attempt(STOCK, partial(_stock, StockModel(model), settings))
        attempt(BATCHING, partial(_continuous_batching, StockModel(model), settings))
    copied = copy_bandwidth(device)
    found["copy_tb_per_s"], found["limit_ms"] = copied / 1e12, step_bytes(model) / copied * 1e3
    return found | {"notes": ours.notes}


def _model(shape: str, device: str, settings: Settings) -> Any:
    torch.manual_seed(0)
    model = random_model(shape, device, DTYPES[device])
    return pack_randomly(model) if settings.mxfp4 else model


class Ours:
    """KVBoost. Every prompt says what must have served it."""

    def __init__(self, model: Any, settings: Settings, bench: Bench) -> None:
        self._model, self._settings, self._bench = model, settings, bench
        self._tokenizer = number_tokenizer(model.config.vocab_size)
        self._rng = random.Random(1)
        self.notes: list[str] = []

    def in_gpu_memory(self, times: Times) -> None:
        with self._engine() as engine:
            engine.rehearse()  # as a server does; else rows run in graphs of larger sizes at first
            for length in self._settings.lengths:
                self._note(times, length, self._timers(engine, length))
            times[STEP] = {
                requests: _per_step(partial(_answer, engine, requests), self._settings.rounds)
                for requests in self._settings.requests
            }
            self.notes += engine.notes
            if engine.device.type == "cuda":
                _check_tier(engine, "gpu")
                if self._settings.profile:
                    self._profile(engine)

    def in_ram(self, times: Times) -> None:
        with self._engine(gpu_cache_bytes=0) as engine:
            for length in self._settings.lengths:
                text = self._tokens(length - QUESTION)
                _ask(engine, text)
                self._note(times, length, {IN_RAM: partial(self._known, engine, text)})
            _check_tier(engine, "ram")

    def on_disk(self, times: Times) -> None:
        """One engine writes, and another reads each document once."""
        for length in self._settings.lengths:
            texts = [self._tokens(length - QUESTION) for _ in range(DOCUMENTS)]
            with tempfile.TemporaryDirectory(prefix="kvboost-gpu-") as folder:
                with self._engine(disk_cache_dir=folder) as engine:
                    for text in texts:
                        _ask(engine, text)
                with self._engine(disk_cache_dir=folder) as engine:
                    _ask(engine, self._tokens(length), keep=False)
                    found = [self._known(engine, text, 0) for text in texts]
                    _check_tier(engine, "disk")
            times.setdefault(ON_DISK, {})[length] = statistics.median(found[1:])

    def _engine(self, **options: Any) -> KVBoost:
        options = {"gpu_cache_bytes": CACHE} | options if torch.cuda.is_available() else options
        return KVBoost.from_model(
            self._model,
            self._tokenizer,
            max_running=max(self._settings.requests),
            max_cache_bytes=CACHE,
            reuse_moved="always",
            recompute_strategy="query",  # random weights tell "auto" nothing about how many rows
            recompute_ratio=self._settings.ratio,
            **options,
        )

    def _tokens(self, number: int) -> list[int]:
        return tokens_of(self._rng, number)

    def _known(self, engine: KVBoost, text: list[int], _: int) -> float:
        found, result = _ask(engine, [*text, *self._tokens(QUESTION)], keep=False)
        _check(result.exact_tokens > 0.9 * len(text), f"{result.exact_tokens} tokens were known")
        return found

    def _timers(self, engine: KVBoost, length: int) -> dict[str, Callable[[int], float]]:
        each = (length - HEADER - QUESTION) // PASSAGES
        passages = [self._tokens(each) for _ in range(PASSAGES)]
        text = [*self._tokens(HEADER), *chain.from_iterable(passages)]
        _ask(engine, text)

        def new(_: int) -> float:
            found, result = _ask(engine, self._tokens(length), keep=False)
            _check(result.cached_tokens == 0, f"{result.cached_tokens} tokens were known")
            return found

        def moved(_: int) -> float:
            order = chain.from_iterable(self._rng.sample(passages, PASSAGES))
            prompt = [*self._tokens(HEADER), *order, *self._tokens(QUESTION)]
            found, result = _ask(engine, prompt, keep=False)
            _check(result.moved_tokens > length // 2, f"{result.moved_tokens} tokens were moved")
            return found

        return {READ: new, KNOWN: partial(self._known, engine, text), MOVED: moved}

    def _note(self, times: Times, length: int, timers: dict[str, Callable[[int], float]]) -> None:
        for name, sample in take_turns(timers, self._settings.rounds).items():
            times.setdefault(name, {})[length] = sample.median_ms

    def _profile(self, engine: KVBoost) -> None:
        for length in self._settings.lengths:
            ask = partial(_ask, engine, self._tokens(length), keep=False)
            self._kernels(f"reading {length:,} tokens", ask)
        for requests in self._settings.requests:
            answer = partial(_answer, engine, requests, SHORT)
            self._kernels(f"{SHORT} steps of {requests}, and their prompts", answer)

    def _kernels(self, name: str, run: Callable[[], object]) -> None:
        """Shows what the GPU does meanwhile, and how busy it is."""
        spans = _gpu_kernels(run)
        spent: dict[str, float] = defaultdict(float)
        for kernel, start, end in spans:
            spent[kernel] += end - start
        wall = max(end for *_, end in spans) - spans[0][1]
        told = f"{len(spans)} kernels, busy {sum(spent.values()) / 1e3:.2f} of {wall / 1e3:.2f} ms"
        most = sorted(spent.items(), key=lambda item: -item[1])[:16]
        rows = [(kernel[:80], f"{us:,.0f}") for kernel, us in most]
        self._bench.console.print(table(f"{name}: {told}", ("kernel",), ("µs",), rows))


def _ask(engine: KVBoost, prompt: list[int], **options: Any) -> tuple[float, Any]:
    """Milliseconds to the first token, and the result."""
    started = time.perf_counter()
    stream = engine.stream(prompt, 1, ignore_eos=True, **options)
    next(stream, None)
    found = (time.perf_counter() - started) * 1e3
    for _ in stream:
        pass
    return found, stream.result


def _answer(engine: KVBoost, requests: int, tokens: int) -> None:
    prompts = _prompts(requests)
    if requests == 1:
        engine.generate(prompts[0], tokens, "baseline", ignore_eos=True)
    else:
        engine.generate_batch(prompts, tokens, "baseline", ignore_eos=True)


def _prompts(requests: int) -> list[list[int]]:
    rng = random.Random(requests)
    return [tokens_of(rng, ALONE if requests == 1 else TOGETHER) for _ in range(requests)]


def _check(true: bool, told: str) -> None:
    if not true:
        raise KVBoostError(f"another path was measured: {told}")


def _check_tier(engine: KVBoost, name: str) -> None:
    _check(engine.cache_stats()["tiers"][name]["hits"] > 0, f"nothing came from the tier {name}")


def _per_step(run: Callable[[int], object], rounds: int) -> float:
    """Milliseconds per token of ``run(tokens)``; the first run compiles and captures."""
    run(SHORT)
    found = []
    for _ in range(rounds):
        marks = [time.perf_counter()]
        for tokens in (SHORT, LONG):
            run(tokens)
            marks.append(time.perf_counter())
        found.append((marks[2] - 2 * marks[1] + marks[0]) / (LONG - SHORT) * 1e3)
    return statistics.median(found)


def _vllm(settings: Settings, bench: Bench, shape: str, times: Times) -> None:
    options = ["--plain", "--shape", shape, "--rounds", str(settings.rounds + 1)]
    for name, numbers in (("--lengths", settings.lengths), ("--steps", settings.requests)):
        options += [name, ",".join(map(str, numbers))]
    found = run_worker(Place(str(settings.vllm), "", "cuda"), [*options, "--decoding", "1"])
    bench.machine["vllm"] = found["version"]
    for name, key in ((READ, "cold_ms"), (KNOWN, "known_ms"), (MOVED, "off_ms")):
        times[name] = {length: found[str(length)][key] for length in settings.lengths}
    times[STEP] = {int(number): step for number, step in found["steps"].items()}


def _stock(stock: StockModel, settings: Settings, times: Times) -> None:
    for length in settings.lengths:
        prompts = [tokens_of(random.Random(length), length)]
        timer = Contender(lambda _, prompts=prompts: stock.generate_batch(prompts, 1))  # type: ignore[misc]
        found = interleave({READ: timer}, settings.rounds)
        times.setdefault(READ, {})[length] = found[READ].median_ms
    for requests in settings.requests:
        step = _per_step(partial(stock.generate_batch, _prompts(requests)), 1)
        times.setdefault(STEP, {})[requests] = step


def answered_together(
    stock: StockModel, prompts: Sequence[Sequence[int]], tokens: int
) -> list[list[float]]:
    """The times, in seconds, at which transformers' own continuous batching gives the tokens of
    each answer; raises RuntimeError if it does not answer all prompts."""
    config = copy.deepcopy(stock.model.generation_config)
    config.do_sample = False
    found = stock.model.generate_batch(
        [list(prompt) for prompt in prompts],
        config,
        max_new_tokens=tokens,
        record_timestamps=True,
    )
    times = [list(one.timestamps or ()) for one in found.values()]
    if len(times) != len(prompts) or any(len(some) != tokens for some in times):
        raise RuntimeError(f"{len(times)} of {len(prompts)} prompts were answered in full")
    return times


def _continuous_batching(stock: StockModel, settings: Settings, times: Times) -> None:
    """By the second half of the answers, when all requests decode."""
    for requests in settings.requests:
        answers = answered_together(stock, _prompts(requests), LONG)
        each = [(some[-1] - some[LONG // 2]) / (LONG - 1 - LONG // 2) for some in answers]
        times.setdefault(STEP, {})[requests] = statistics.median(each) * 1e3


def _gpu_kernels(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of everything that the GPU does during ``run``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if "CUDA" in str(event.device_type)
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def _ratio(times: dict[str, Times], what: str, at: int) -> float | None:
    """Our time ÷ vLLM's."""
    ours = times.get(OURS, {}).get(what, {}).get(at)
    theirs = times.get(VLLM, {}).get(AGAINST.get(what, what), {}).get(at)
    return None if ours is None or theirs is None else ours / theirs


def _report(found: dict[str, Any], problems: list[str]) -> Report:
    shown = [table_of(shape, one) for shape, one in found.items()]
    return Report({"shapes": found}, shown, goals_of(found), problems=problems)


def table_of(shape: str, one: dict[str, Any]) -> RenderableType:
    times = one["times"]
    rows = []
    for what, some in times.get(OURS, {}).items():
        for at in sorted(some):
            each = [theirs.get(what, {}).get(at) for theirs in times.values()]
            cells = ["–" if value is None else ms(value) for value in each]
            ratio = _ratio(times, what, at)
            cells.append("" if ratio is None else f"{ratio:.2f}")
            cells.append(f"{one['limit_ms'] / some[at]:.0%}" if what == STEP else "")
            rows.append((f"{what}, {at:,}", *cells))
    title = f"{shape}: ms to the first token by tokens, and per step by requests"
    if (weights := one.get("weights", "plain")) != "plain":
        title += f" ({OURS}: {weights}; {VLLM}: plain, bfloat16)"
    return table(title, ("",), (*times, "÷ vLLM", "of the limit"), rows)


def goals_of(found: dict[str, Any]) -> list[Goal]:
    """The worst of the shapes that a goal is about."""
    judged = []
    for shape, what, at, most in GOALS:
        asked = [shape] if shape else [name for name in found if name != "tiny"]
        each = [_ratio(found[name]["times"], what, at) for name in asked if name in found]
        known = [ratio for ratio in each if ratio is not None]
        judged.append(keeps_to(max(known, default=None), most))
    return judge(BENCHMARKS["gpu"].goals, judged)
