"""What a batch gains: many answers at once, and many questions about one document."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvboost import GenerationMode, KVBoost
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import ROUNDS, Bench, ModelSettings, Report, option
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.record import as_json
from kvboost.bench.kit.tables import table
from kvboost.bench.kit.timing import Contender, Sample, interleave
from kvboost.bench.texts.prompts import PATTERNS, fragments, question
from kvboost.config import EngineConfig
from kvboost.model.attention import Segment
from kvboost.model.kv import RequestKV
from kvboost.model.load import LoadedModel
from kvboost.progress import Progress

EXACT = GenerationMode.PREFIX_CACHE
QUESTION_TOKENS = 32
NEW_TOKENS = 33
FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"tokens": 512, "requests": 4, "rounds": 1}

    tokens: int = option(4096, "Tokens of the document that all share.", least=256)
    requests: int = option(8, "Requests at once.", least=2, most=64)
    rounds: int = option(5, ROUNDS, least=1, most=50)

    def tokens_read(self) -> float:
        document = self.tokens * self.requests * 2 * (self.rounds // 2 + 1)
        return document + 200 * self.requests * (self.rounds + 1) + 200 * 25


@dataclass(frozen=True)
class Compared:
    """Two ways of doing the same work in one run."""

    slow: Sample
    fast: Sample

    @property
    def factor(self) -> float:
        return self.slow.median_ms / self.fast.median_ms


@dataclass(frozen=True)
class Shared:
    """One decode step of requests after the same rows: each has its own copy, or all share one."""

    step: Compared
    own_bytes: int
    shared_bytes: int

    @property
    def factor(self) -> float:
        return self.step.factor


def run(settings: Settings, bench: Bench) -> Report:
    loaded, tokens, requests = bench.load_model(), settings.tokens, settings.requests
    rounds = settings.rounds
    with (
        Progress(f"{requests} requests at once") as progress,
        progress.step("rounds", 2 * rounds + max(rounds, 20) + 3) as step,
    ):
        decode = measure_decode(loaded, requests, NEW_TOKENS, rounds, step.advance)
        shared = measure_shared(loaded, tokens, requests, rounds, step.advance)
        document = measure_document(loaded, tokens, requests, max(1, rounds // 2), step.advance)

    def speed(sample: Sample) -> str:
        return f"{requests * NEW_TOKENS / sample.median_ms * 1e3:,.0f} tokens/s"

    own, together, held = shared.own_bytes, shared.shared_bytes, shared.step
    new = _ms(document.slow), _ms(document.fast)
    rows = [
        ("answers to known prompts", speed(decode.slow), speed(decode.fast), decode.factor),
        (f"one step after {tokens:,} tokens", _ms(held.slow), _ms(held.fast), held.factor),
        (f"KV of {tokens:,} tokens", _mb(own), _mb(together), own / together),
        (f"questions about {tokens:,} new tokens", *new, document.factor),
    ]
    shown = table(
        f"{requests} requests",
        ("",),
        ("each by itself", "together", "factor"),
        [(name, slow, fast, f"{factor:.2f} ×") for name, slow, fast, factor in rows],
    )
    (text,) = BENCHMARKS["batch"].goals
    goal = Goal(text, decode.factor >= FACTOR, f"{decode.factor:.2f} ×")
    figures = {"requests": requests, "tokens": tokens}
    parts = {"decode": decode, "shared": shared, "document": document}
    return Report(
        {**figures, **{name: as_json(part, "factor") for name, part in parts.items()}},
        [shown],
        [goal],
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _ms(sample: Sample) -> str:
    return f"{sample.median_ms:,.0f} ms"


def measure_decode(
    model: LoadedModel,
    requests: int,
    new_tokens: int,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> Compared:
    """Answers to prompts that were read before, one after the other and all at once."""
    with KVBoost(model, EngineConfig(max_running=requests)) as engine:
        text = PATTERNS["code"].shared(fragments(engine.encode), 256 * requests)
        prompts = [text[i * 256 : (i + 1) * 256] for i in range(requests)]
        for prompt in prompts:
            engine.warm(prompt)

        def one_by_one(_: int) -> None:
            for prompt in prompts:
                engine.generate(prompt, new_tokens, EXACT, ignore_eos=True, keep=False)

        def at_once(_: int) -> None:
            engine.generate_batch(prompts, new_tokens, EXACT, ignore_eos=True, keep=False)

        ways = {"slow": Contender(one_by_one), "fast": Contender(at_once)}
        return Compared(**interleave(ways, rounds, on_round))


def measure_document(
    model: LoadedModel,
    tokens: int,
    requests: int,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> Compared:
    """Questions about a document that was never read: each request reads it, or all wait for the
    first."""
    engines = {
        name: KVBoost(model, EngineConfig(max_running=requests, sharing_wait=wait))
        for name, wait in {"slow": 0.0, "fast": 3600.0}.items()
    }
    encode = fragments(engines["slow"].encode)
    document = PATTERNS["code"].shared(encode, tokens)
    prompts = [document + question(encode, i, QUESTION_TOKENS) for i in range(requests)]

    def ask(engine: KVBoost) -> Contender:
        def answer(_: int) -> None:
            engine.generate_batch(prompts, 16, EXACT, ignore_eos=True)

        return Contender(answer, after=engine.clear)

    try:
        ways = {name: ask(engine) for name, engine in engines.items()}
        return Compared(**interleave(ways, rounds, on_round))
    finally:
        for engine in engines.values():
            engine.close()


def measure_shared(
    model: LoadedModel,
    tokens: int,
    requests: int,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> Shared:
    """Attention takes as long whatever the numbers are, so the rows are random."""
    shape = model.forward.shape
    own = [RequestKV(shape, tokens + 256) for _ in range(requests)]
    own[0].data.normal_()
    for kv in own[1:]:
        kv.data.copy_(own[0].data)
    base = RequestKV(shape, tokens)
    base.data.copy_(own[0].data[:, :, :, :tokens])
    on_base = [RequestKV(shape, 256) for _ in own]
    for kv, alone in zip(on_base, own, strict=True):
        kv.data.copy_(alone.data[:, :, :, tokens:])
        kv.attach_prefix(base.share(tokens))
    token = torch.zeros(1, dtype=torch.long)

    def step(kvs: list[RequestKV]) -> Contender:
        def decode(_: int) -> None:
            at = tokens + QUESTION_TOKENS
            model.forward([Segment(kv, token, range(at, at + 1)) for kv in kvs])

        return Contender(decode)

    times = interleave({"slow": step(own), "fast": step(on_base)}, max(rounds, 20), on_round)
    return Shared(
        Compared(**times),
        own_bytes=sum(kv.data.nbytes for kv in own),
        shared_bytes=base.data.nbytes + sum(kv.data.nbytes for kv in on_base),
    )
