"""One process reads a document and ends, another is asked about it.

Both are real processes. The very first request of the second one is timed and compared with a full
prefill of the same prompt in the same process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import ClassVar

from kvboost import GenerationMode, KVBoost
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, option
from kvboost.bench.kit.machine import here
from kvboost.bench.kit.record import as_json
from kvboost.bench.texts.prompts import PATTERNS, QUESTIONS, fragments
from kvboost.config import KV_BITS
from kvboost.errors import KVBoostError
from kvboost.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"tokens": 1024}

    tokens: int = option(4096, "Tokens of the document.", least=256)
    kv_bits: int = option(16, "Bits of a kept number.", choices=KV_BITS)


@dataclass(frozen=True)
class Restart:
    """The second process. ``ttft_ms`` is that of its first request, ``full_ms`` the median of full
    prefills."""

    num_tokens: int
    bits: int
    ttft_ms: float
    fetch_ms: float
    full_ms: float
    tiers: dict[str, int]
    """Prompt tokens by the tier they came from, or ``"computed"``."""
    same_answer: bool

    @property
    def ratio(self) -> float:
        return self.ttft_ms / self.full_ms


def read_document(folder: str, model: str, num_tokens: int, bits: int, dtype: str | None) -> None:
    """The first process: reads a document and ends without closing the engine."""
    engine = KVBoost.from_pretrained(model, disk_cache_dir=folder, kv_cache_bits=bits, dtype=dtype)
    engine.warm(_document(engine, num_tokens))


def ask(folder: str, model: str, num_tokens: int, bits: int, dtype: str | None) -> Restart:
    """The second process: one question about it, then full prefills to compare with."""
    engine = KVBoost.from_pretrained(model, disk_cache_dir=folder, kv_cache_bits=bits, dtype=dtype)
    with engine:
        question = fragments(engine.encode)(f"\n\n{QUESTIONS[0]}\n")
        prompt = [*_document(engine, num_tokens), *question]
        first = engine.generate(prompt, 8)
        full = [engine.generate(prompt, 8, GenerationMode.BASELINE) for _ in range(3)]
    tiers: dict[str, int] = {}
    for span in first.spans:
        where = span.tier or "computed"
        tiers[where] = tiers.get(where, 0) + span.num_tokens
    return Restart(
        len(prompt),
        bits,
        first.ttft_ms,
        first.timings.fetch_ms,
        statistics.median(result.ttft_ms for result in full),
        tiers,
        first.token_ids == full[0].token_ids,
    )


def run(settings: Settings, bench: Bench) -> Report:
    bench.machine = dict(here())
    arguments = (settings.model, settings.tokens, settings.kv_bits, settings.dtype)
    with (
        tempfile.TemporaryDirectory(prefix="kvboost-restart-") as folder,
        Progress("two processes, one after the other") as progress,
    ):
        with progress.step("the first reads a document"):
            _in_a_process("read_document", folder, *arguments)
        with progress.step("the second is asked about it"):
            answered = _in_a_process("ask", folder, *arguments)
    restart = Restart(**json.loads(answered))
    sources = ", ".join(f"{count:,} {where}" for where, count in restart.tiers.items())
    told = (
        f"{restart.num_tokens:,} prompt tokens ({sources}), {restart.bits} bits: first token of "
        f"the first request after {restart.ttft_ms:.0f} ms, {restart.fetch_ms:.0f} of them waiting "
        f"for the disk; full prefill {restart.full_ms:.0f} ms: {restart.ratio:.2f} of it; "
        f"{'the same' if restart.same_answer else 'another'} answer"
    )
    return Report(as_json(restart, "ratio"), [told])


def _document(engine: KVBoost, num_tokens: int) -> list[int]:
    return PATTERNS["code"].shared(fragments(engine.encode), num_tokens)


def _in_a_process(function: str, *arguments: object) -> str:
    """The result of ``function`` of this module as JSON, from a process of its own."""
    program = (
        "import json, sys, dataclasses; from benchmarks import restart; "
        "name, *given = json.loads(sys.argv[1]); result = getattr(restart, name)(*given); "
        "print(json.dumps(result and dataclasses.asdict(result)))"
    )
    command = [sys.executable, "-c", program, json.dumps([function, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVBoostError(f"the process that should {function} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]
