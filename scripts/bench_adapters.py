"""What adapters cost: a batch in which every request has another adapter, against the base model.

    python scripts/bench_adapters.py [--model NAME] [--adapters 8] [--rank 16] [--rounds 9]

Random adapters of two kinds are measured: of queries and values, PEFT's default for Llama, and of
all linear layers. Rounds of base and adapters alternate, so that a busy machine slows down both.
Prints medians of a decode step, of reading a prompt, and of loading an adapter; JSON comes last.
Ratios of the processor's time are given too: other processes hardly change these. On a CPU that is
shared, ``--alternate`` tells most: in one batch, every other step leaves the adapters out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvboost import KVBoost

QV = ("q_proj", "v_proj")
KINDS = {
    "queries and values": QV,
    "all linear layers": (*QV, "k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
PROMPT = "The keeper of the lighthouse counts the ships that pass by the rocks. "
SHORT = 2
"""Tokens of the shorter answers; the longer ones have so many more steps."""


@dataclass(frozen=True)
class Times:
    """Seconds on the clock, and of the processor."""

    wall: float
    cpu: float

    def __sub__(self, other: Times) -> Times:
        return Times(self.wall - other.wall, self.cpu - other.cpu)


def now() -> Times:
    return Times(time.perf_counter(), time.process_time())


def write_adapter(
    folder: Path, engine: KVBoost, targets: Sequence[str], rank: int, dtype: torch.dtype
) -> Path:
    """A random adapter, whose factors are both other than zero."""
    tensors = {}
    for name, module in engine._model.forward.model.named_modules():
        if name.rpartition(".")[2] in targets:
            sizes: Any = module.out_features, module.in_features
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, sizes[1]) / 50
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(sizes[0], rank) / 50
    folder.mkdir()
    save_file(
        {name: one.to(dtype) for name, one in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*targets]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def seconds(engine: KVBoost, names: Sequence[str | None], num_tokens: int) -> Times:
    began = now()
    prompts = [f"{number}. {PROMPT}" for number in range(len(names))]
    engine.generate_batch(
        prompts,
        num_tokens,
        "baseline",
        each=[{"adapter": name} for name in names],
        ignore_eos=True,
    )
    return now() - began


def alternate(engine: KVBoost, names: Sequence[str | None], num_steps: int) -> float:
    """What steps with adapters take of the processor's time, divided by what steps without them
    take. Both are steps of one batch, in turn; its answers mean nothing."""
    hooks: Any = engine._model.forward._hooks
    applied = hooks.applied
    times: list[float] = []

    @contextmanager
    def timed(segments: Any) -> Iterator[None]:
        is_step = [len(segment) for segment in segments] == [1] * len(names)
        began = time.process_time()
        with nullcontext() if is_step and len(times) % 2 else applied(segments):
            yield
        if is_step:
            times.append(time.process_time() - began)

    hooks.applied = timed
    try:
        seconds(engine, names, SHORT + 2 * num_steps)
    finally:
        del hooks.applied
    pairs = zip(times[::2], times[1::2], strict=False)
    return statistics.median(mine / base for mine, base in pairs)


def measure(engine: KVBoost, folder: Path, kind: str, given: argparse.Namespace) -> Any:
    count, rank, rounds = given.adapters, given.rank, given.rounds
    saved = getattr(torch, given.saved) if given.saved else engine.dtype
    names = [f"{kind} {number}" for number in range(count)]
    loading = []
    for number, name in enumerate(names):
        path = write_adapter(folder / f"{kind} {number}", engine, KINDS[kind], rank, saved)
        began = now()
        engine.load_adapter(name, path)
        loading.append(now() - began)
    cases: dict[str, list[str | None]] = {
        "base": [None] * count,
        "adapters": [*names],
        "one adapter": [names[0]] * count,
    }
    if given.alternate:
        seconds(engine, names, SHORT)  # warms up
        found = {case: alternate(engine, cases[case], given.steps) for case in [*cases][1:]}
        for name in names:
            engine.unload_adapter(name)
        return {"step_cpu_ratio": found}
    steps: dict[str, list[Times]] = {case: [] for case in cases}
    reading: dict[str, list[Times]] = {case: [] for case in cases}
    for turn in range(rounds + 1):
        for case, asked in cases.items():
            short = seconds(engine, asked, SHORT)
            long = seconds(engine, asked, SHORT + given.steps)
            if turn:  # the first round warms up
                steps[case].append(long - short)
                reading[case].append(short)
    size = engine.adapters()[names[0]].num_bytes
    for name in names:
        engine.unload_adapter(name)

    def ratios(clock: str) -> dict[str, float]:
        return {
            case: statistics.median(
                getattr(mine, clock) / getattr(base, clock)
                for mine, base in zip(steps[case], steps["base"], strict=True)
            )
            for case in cases
        }

    def median_ms(times: Sequence[Times]) -> float:
        return statistics.median(one.wall for one in times) * 1e3

    return {
        "adapter_bytes": size,
        "load_ms": median_ms(loading),
        "load_cpu_ms": statistics.median(one.cpu for one in loading) * 1e3,
        "step_ms": {case: median_ms(steps[case]) / given.steps for case in cases},
        "step_ratio": ratios("wall"),
        "step_cpu_ratio": ratios("cpu"),
        "begin_ms": {case: median_ms(reading[case]) for case in cases},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--threads", type=int, help="of torch; fewer on a machine that is shared")
    parser.add_argument(
        "--saved", help="the dtype of the adapters' files; the model's if not given"
    )
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=16, help="more on a device that is fast")
    parser.add_argument("--alternate", action="store_true", help="for CPUs that are shared")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    report: dict[str, Any] = {**vars(given), "threads": torch.get_num_threads()}
    with (
        tempfile.TemporaryDirectory() as folder,
        KVBoost.from_pretrained(given.model, device=given.device, dtype=given.dtype) as engine,
    ):
        report["dtype"], report["device"] = str(engine.dtype), str(engine.device)
        for kind in given.kinds:
            found = measure(engine, Path(folder), kind, given)
            report[kind] = found
            if given.alternate:
                ratios = found["step_cpu_ratio"]
                print(
                    f"{kind}, rank {given.rank}: a step of {given.adapters} requests takes "
                    f"{ratios['adapters']:.2f} x the processor's time with {given.adapters} "
                    f"different ones, {ratios['one adapter']:.2f} x with one",
                    flush=True,
                )
                continue
            print(
                f"{kind}, rank {given.rank}: a step of {given.adapters} requests takes "
                f"{found['step_ms']['base']:.1f} ms without adapters, "
                f"{found['step_ratio']['adapters']:.2f} x with {given.adapters} different ones "
                f"({found['step_cpu_ratio']['adapters']:.2f} x the processor's time), "
                f"{found['step_ratio']['one adapter']:.2f} x with one "
                f"({found['step_cpu_ratio']['one adapter']:.2f} x); loading takes "
                f"{found['load_ms']:.0f} ms, {found['load_cpu_ms']:.0f} of the processor",
                flush=True,
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()
