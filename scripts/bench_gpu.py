"""Decoding on a GPU: milliseconds per step of KVBoost and of stock transformers, in one process.

    python scripts/bench_gpu.py --shape 1.5b --requests 1 8 64
    python scripts/bench_gpu.py --shape 7b --profile

Models have random weights in the shapes of Qwen2.5. A step is timed from outside: the difference
between a long and a short answer to the same prompts, divided by the tokens between them. `graph`
and `sampling` are what the GPU takes to replay both graphs of a step; the rest of a step is Python.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from kvboost import KVBoost
from kvboost.config import EngineConfig

SHAPES: dict[str, dict[str, int]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4},
}  # fmt: skip
VOCAB = 151_936
ALONE, TOGETHER = 2048, 512
"""Tokens of a prompt that runs alone, and of several that run together."""
SHORT, LONG = 16, 80
"""Tokens of the two answers whose difference is measured."""


def main() -> None:
    args = _arguments()
    torch.manual_seed(0)
    with phase("model"):
        model = make_model(args.shape, args.dtype)
    report: dict[str, Any] = {
        "shape": args.shape,
        "dtype": args.dtype,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    config = EngineConfig(max_running=max(args.requests), graphs=args.graphs)
    decode: dict[int, dict[str, Any]] = {requests: {} for requests in args.requests}
    report["decode"] = decode
    with phase("engine"):
        engine = KVBoost.from_model(model, make_tokenizer(), config=config)
    with engine:
        for requests in args.requests:
            with told(report, f"{requests} requests"):
                decode[requests] |= measure_engine(engine, requests, args)
                print(f"{requests} requests: {decode[requests]}", flush=True)
        with told(report, "reading"), phase("reading"):
            report |= measure_reading(engine)
        with told(report, "notes"):
            report["notes"] = notes_of(engine)
            print(report["notes"], flush=True)
        if args.profile:
            for requests in args.requests:
                with told(report, f"profile of {requests}"):
                    profile(engine, requests)
        if args.plain_layers and (steps := engine._model.forward.steps) is not None:
            with told(report, "plain layers"), phase("graphs of the model's own layers"):
                engine._model.forward.fused_layers.restore()  # type: ignore[union-attr]
                steps.forget_graphs()
                for requests in args.requests:
                    prompts = prompts_for(requests)
                    engine.generate_batch(prompts, 4, "baseline", ignore_eos=True)
                    plain = replays(engine, requests)
                    decode[requests]["plain_graph_ms"] = plain.get("graph_ms")
    if args.stock:
        for requests in args.requests:
            with told(report, "stock"), phase(f"stock transformers, {requests} requests"):
                decode[requests]["stock_ms"] = measure_stock(model, requests, args)
    for requests, found in decode.items():
        print(f"{args.shape} {requests:3} requests: {found}")
    print(json.dumps(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--graphs", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--plain-layers", action="store_true", help="also the model's own layers")
    parser.add_argument("--no-stock", dest="stock", action="store_false")
    return parser.parse_args()


@contextmanager
def phase(name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    torch.cuda.synchronize()
    print(f"[{time.perf_counter() - start:7.2f} s] {name}", flush=True)


def make_model(shape: str, dtype: str) -> PreTrainedModel:
    config = Qwen2Config(
        vocab_size=VOCAB,
        max_position_embeddings=32_768,
        tie_word_embeddings=shape != "7b",
        bos_token_id=None,
        eos_token_id=None,
        **SHAPES[shape],
    )
    config.dtype = getattr(torch, dtype)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cuda"):
            return Qwen2ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(previous)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and numbers for the model's other tokens: random weights choose any, and
    all have a text, as those of a real model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"word{number}" for number in range(len(alphabet), VOCAB)]
    vocab = {symbol: number for number, symbol in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def prompts_for(requests: int) -> list[list[int]]:
    length = ALONE if requests == 1 else TOGETHER
    generator = torch.Generator().manual_seed(requests)
    return torch.randint(0, VOCAB, (requests, length), generator=generator).tolist()


def per_step(run: Callable[[int], object], repeats: int) -> float:
    """Milliseconds per token of ``run(tokens)``: the median over ``repeats``."""
    found = []
    for _ in range(repeats):
        seconds = []
        for tokens in (SHORT, LONG):
            torch.cuda.synchronize()
            start = time.perf_counter()
            run(tokens)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        found.append((seconds[1] - seconds[0]) / (LONG - SHORT) * 1e3)
    return round(statistics.median(found), 3)


def measure_engine(engine: KVBoost, requests: int, args: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_for(requests)

    def run(tokens: int, **options: Any) -> None:
        options = {"mode": "baseline", "ignore_eos": True, **options}
        if requests == 1:
            engine.generate(prompts[0], tokens, **options)
        else:
            engine.generate_batch(prompts, tokens, **options)

    with phase(f"first run of {requests} requests (compiles and captures)"):
        run(4)
    with phase(f"{requests} requests, greedy"):
        found: dict[str, Any] = {"step_ms": per_step(run, args.repeats)}
    sampled = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "seed": 1}
    with phase(f"{requests} requests, sampled"):
        run(4, **sampled)
        found["sampled_ms"] = per_step(lambda tokens: run(tokens, **sampled), args.repeats)
    return {**found, **replays(engine, requests)}


def replays(engine: KVBoost, requests: int) -> dict[str, float]:
    """What the GPU takes for the graphs of a step, back to back."""
    steps = engine._model.forward.steps
    if steps is None:
        return {}
    bucket = steps._buckets.get(requests)
    if bucket is None or bucket._run is None:
        return {}
    functions = {"graph_ms": bucket._run}
    for kind, sample in bucket._samplers.items():
        functions["draw_ms" if kind.draws else "greedy_ms"] = sample
    found = {}
    with torch.inference_mode(), engine._model.forward._lock:
        engine._model.forward.bind()
        for name, function in functions.items():
            found[name] = round(_timed(function), 3)
    return found


def _timed(function: Callable[[], object], count: int = 30) -> float:
    for _ in range(3):
        function()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(count):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / count


def measure_stock(model: PreTrainedModel, requests: int, args: argparse.Namespace) -> float:
    ids = torch.tensor(prompts_for(requests), device="cuda")

    def run(tokens: int) -> None:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
        )

    run(4)
    return per_step(run, 1)


def notes_of(engine: KVBoost) -> dict[str, Any]:
    steps = engine._model.forward.steps
    if steps is None:
        return {"pages": engine._runtime.pages.reason}
    capture: Any = steps.capture
    slab = steps.slab
    return {
        "pages": slab.num_pages,
        "slab_gb": round(slab.data.nbytes / 1e9, 1),
        "steps": steps.num_steps,
        "ahead": steps.num_ahead,
        "graphs": getattr(capture, "num_graphs", 0),
        "graph_mb": round(getattr(capture, "used_bytes", 0) / 1e6),
        "note": capture.note,
        "layers": engine._model.forward.fused_layers and engine._model.forward.fused_layers.note,
        "leaks": slab.check_integrity(),
    }


def profile(engine: KVBoost, requests: int) -> None:
    """Prints the kernels of a replayed step, and how busy the GPU is while an answer comes."""
    steps = engine._model.forward.steps
    bucket = steps._buckets.get(requests) if steps is not None else None
    if bucket is None or bucket._run is None:
        print(f"--- {requests} requests: no step to profile")
        return
    replayed = bucket._run

    def replay() -> None:
        with torch.inference_mode(), engine._model.forward._lock:
            for _ in range(10):
                replayed()

    found = kernels_of(replay)
    busy = sum(end - start for _, start, end in found) / 10
    wall = (found[-1][2] - found[0][1]) / 10
    print(f"--- {requests} requests: {len(found) // 10} kernels a step, busy {busy / 1e3:.3f} of")
    print(f"    {wall / 1e3:.3f} ms; microseconds a step, kernels a step, name:")
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, start, end in found:
        spent[name] += end - start
        count[name] += 1
    for name, total in spent.most_common(18):
        print(f"    {total / 10:8.1f} {count[name] / 10:6.1f}  {name[:90]}")

    prompts = prompts_for(requests)
    found = kernels_of(lambda: engine.generate_batch(prompts, 40, "baseline", ignore_eos=True))
    found = found[len(found) * 2 // 3 :]  # the last steps: nothing is read then
    busy, wall = sum(end - start for _, start, end in found), found[-1][2] - found[0][1]
    gaps = sorted((after[1] - before[2] for before, after in pairwise(found)), reverse=True)[:10]
    print(f"    while answering: busy {busy / 1e3:.1f} of {wall / 1e3:.1f} ms;", end=" ")
    print(f"longest gaps in microseconds: {[round(gap) for gap in gaps]}", flush=True)


def kernels_of(run: Callable[[], object]) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of everything that the GPU does during ``run``."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        run()
        torch.cuda.synchronize()
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: kernel[1])


def measure_reading(engine: KVBoost) -> dict[str, float]:
    """Milliseconds to the first token of 8,192 tokens: all to be read, and all known but one."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (8192,), generator=generator).tolist()
    found = {}
    for name, mode in (("read_8k", "baseline"), ("known_8k", "prefix_cache")):
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine.generate(ids, 1, mode, ignore_eos=True)
            times.append((time.perf_counter() - start) * 1e3)
        found[name] = round(statistics.median(times[1:]), 1)
    return found


@contextmanager
def told(report: dict[str, Any], name: str) -> Iterator[None]:
    """A failure is printed and noted, and what follows still runs."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        report.setdefault("failures", []).append(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
