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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        "decode": {},
    }
    config = EngineConfig(max_running=max(args.requests), graphs=args.graphs)
    with KVBoost.from_model(model, make_tokenizer(), config=config) as engine:
        for requests in args.requests:
            report["decode"][requests] = ours = measure_engine(engine, requests, args)
            print(f"{requests} requests: {ours}", flush=True)
        report["notes"] = notes_of(engine)
        print(report["notes"], flush=True)
        if args.profile:
            for requests in args.requests:
                profile(engine, requests)
    if args.stock:
        for requests in args.requests:
            with phase(f"stock transformers, {requests} requests"):
                report["decode"][requests]["stock_ms"] = measure_stock(model, requests, args)
    for requests, found in report["decode"].items():
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
    """One token per byte; the model's other tokens have no text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: number for number, symbol in enumerate(alphabet)}
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
        "leaks": slab.check_integrity(),
    }


def profile(engine: KVBoost, requests: int) -> None:
    """Prints the kernels of 20 steps, and how long the GPU had nothing to do."""
    from torch.profiler import ProfilerActivity

    prompts = prompts_for(requests)
    tokens = 22
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        engine.generate_batch(prompts, tokens, "prefix_cache", ignore_eos=True, keep=False)
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: event.time_range.start)
    cut = (
        kernels[-1].time_range.start
        - (kernels[-1].time_range.end - kernels[0].time_range.start) / 2
    )
    late = [event for event in kernels if event.time_range.start > cut]
    busy = sum(event.time_range.elapsed_us() for event in late)
    wall = late[-1].time_range.end - late[0].time_range.start
    print(f"--- {requests} requests: GPU busy {busy / 1e3:.1f} of {wall / 1e3:.1f} ms")
    print(
        seen.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70
        )
    )


if __name__ == "__main__":
    main()
