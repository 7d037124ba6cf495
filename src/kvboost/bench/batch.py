"""What a batch gains: decoding many answers at once, and many questions about one document."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
from rich.console import Console
from rich.table import Table

from kvboost import GenerationMode, KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import PATTERNS, fragments, question
from kvboost.config import EngineConfig
from kvboost.model.kv import RequestKV
from kvboost.model.load import LoadedModel, load
from kvboost.model.segment import Segment
from kvboost.progress import Progress

EXACT = GenerationMode.PREFIX_CACHE
QUESTION_TOKENS = 32


@dataclass(frozen=True)
class Compared:
    """Two ways of doing the same work in one run."""

    slow: Sample
    fast: Sample

    @property
    def factor(self) -> float:
        return self.slow.median_ms / self.fast.median_ms


def measure_decode(model: LoadedModel, requests: int, new_tokens: int, rounds: int) -> Compared:
    """Answers to prompts that were read before, one after the other and all at once."""
    with KVBoost(model, EngineConfig(max_running=requests)) as engine:
        encode = fragments(engine.encode)
        text = PATTERNS["code"].shared(encode, 256 * requests)
        prompts = [text[i * 256 : (i + 1) * 256] for i in range(requests)]
        for prompt in prompts:
            engine.warm(prompt)

        def one_by_one(_: int) -> None:
            for prompt in prompts:
                engine.generate(prompt, new_tokens, EXACT, ignore_eos=True, keep=False)

        def at_once(_: int) -> None:
            engine.generate_batch(prompts, new_tokens, EXACT, ignore_eos=True, keep=False)

        times = interleave({"slow": Contender(one_by_one), "fast": Contender(at_once)}, rounds)
    return Compared(**times)


def measure_document(model: LoadedModel, tokens: int, requests: int, rounds: int) -> Compared:
    """Questions about a document nobody has read: everyone reads it, or all wait for one."""
    waits = {"slow": 0.0, "fast": 3600.0}
    engines = {
        name: KVBoost(model, EngineConfig(max_running=requests, sharing_wait=wait))
        for name, wait in waits.items()
    }
    encode = fragments(next(iter(engines.values())).encode)
    document = PATTERNS["code"].shared(encode, tokens)
    prompts = [document + question(encode, i, QUESTION_TOKENS) for i in range(requests)]

    def ask(engine: KVBoost) -> Contender:
        def run(_: int) -> None:
            engine.generate_batch(prompts, 16, EXACT, ignore_eos=True)

        return Contender(run, after=engine.clear)

    try:
        return Compared(**interleave({name: ask(one) for name, one in engines.items()}, rounds))
    finally:
        for engine in engines.values():
            engine.close()


@dataclass(frozen=True)
class Shared:
    """One decode step of requests behind the same rows: everyone's own, or held once."""

    step: Compared
    own_bytes: int
    shared_bytes: int


def measure_shared(model: LoadedModel, tokens: int, requests: int, rounds: int) -> Shared:
    """The attention is the same whatever the numbers are, so the rows are random ones."""
    shape = model.forward.shape
    own = [RequestKV(shape, tokens + 256) for _ in range(requests)]
    own[0].data.normal_()
    for kv in own[1:]:
        kv.data.copy_(own[0].data)
    base = RequestKV(shape, tokens)
    base.data.copy_(own[0].data[:, :, :, :tokens])
    on_base = []
    for kv in own:
        one = RequestKV(shape, 256)
        one.data.copy_(kv.data[:, :, :, tokens:])
        one.attach_prefix(base.share(tokens))
        on_base.append(one)
    token = torch.zeros(1, dtype=torch.long)

    def step(kvs: list[RequestKV]) -> Contender:
        def run(_: int) -> None:
            at = tokens + QUESTION_TOKENS
            model.forward([Segment(kv, token, range(at, at + 1)) for kv in kvs])

        return Contender(run)

    times = interleave({"slow": step(own), "fast": step(on_base)}, max(rounds, 20))
    return Shared(
        Compared(**times),
        own_bytes=sum(kv.data.nbytes for kv in own),
        shared_bytes=base.data.nbytes + sum(kv.data.nbytes for kv in on_base),
    )


def run_batch(
    model: str,
    tokens: int,
    requests: int,
    rounds: int,
    console: Console,
    *,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    loaded = load(model, device=device, dtype=dtype)
    new_tokens = 33
    with (
        Progress(f"{requests} requests at once") as progress,
        progress.step("measured", 3) as step,
    ):
        decode = measure_decode(loaded, requests, new_tokens, rounds)
        step.advance()
        shared = measure_shared(loaded, tokens, requests, rounds)
        step.advance()
        document = measure_document(loaded, tokens, requests, max(1, rounds // 2))
        step.advance()
    machine = describe(loaded.device, loaded.forward.shape.dtype)
    generated = requests * new_tokens

    def speed(sample: Sample) -> str:
        return f"{generated / sample.median_ms * 1e3:,.0f} tokens/s"

    table = Table(title=f"{model}, {machine['dtype']}, {requests} requests")
    for heading in ("", "each by itself", "together", "factor"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "answers to known prompts", speed(decode.slow), speed(decode.fast), f"{decode.factor:.2f} ×"
    )
    table.add_row(
        f"one step behind {tokens:,} tokens",
        f"{shared.step.slow.median_ms:.0f} ms",
        f"{shared.step.fast.median_ms:.0f} ms",
        f"{shared.step.factor:.2f} ×",
    )
    table.add_row(
        f"KV behind {tokens:,} tokens",
        f"{shared.own_bytes / 1e6:,.0f} MB",
        f"{shared.shared_bytes / 1e6:,.0f} MB",
        f"{shared.own_bytes / shared.shared_bytes:.2f} ×",
    )
    table.add_row(
        f"questions about {tokens:,} new tokens",
        f"{document.slow.median_ms / 1e3:.1f} s",
        f"{document.fast.median_ms / 1e3:.1f} s",
        f"{document.factor:.2f} ×",
    )
    console.print(table)
    met = "met" if decode.factor >= 3 else "not met"
    console.print(f"decoding together ≥ 3 × one after the other: {met}", highlight=False)
    return {
        "benchmark": "batch",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "requests": requests,
        "tokens": tokens,
        "decode": {**asdict(decode), "factor": decode.factor},
        "shared": {**asdict(shared), "factor": shared.step.factor},
        "document": {**asdict(document), "factor": document.factor},
    }
