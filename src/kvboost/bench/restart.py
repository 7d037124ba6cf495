"""What a cache is worth tomorrow: one process reads a document and ends, another is asked about it.

Both are real processes. The second one's very first request is timed, cold as it is, and compared
with a full prefill of the same prompt in the same process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from rich.console import Console

from kvboost import GenerationMode, KVBoost
from kvboost.bench.workloads import PATTERNS, QUESTIONS, fragments
from kvboost.errors import KVBoostError
from kvboost.progress import Progress


@dataclass(frozen=True)
class Restart:
    """Of the second process. ``ttft_ms`` is its first request's, ``full_ms`` the median of full
    prefills."""

    num_tokens: int
    bits: int
    ttft_ms: float
    fetch_ms: float
    full_ms: float
    tiers: dict[str, int]
    """Prompt tokens by where they came from; what was computed is under ``"computed"``."""
    same_answer: bool

    @property
    def ratio(self) -> float:
        return self.ttft_ms / self.full_ms


def read_document(model: str, folder: str, num_tokens: int, bits: int, dtype: str | None) -> None:
    """The first process: reads a document and ends, as a process does that nobody closes."""
    engine = KVBoost.from_pretrained(model, disk_cache_dir=folder, kv_cache_bits=bits, dtype=dtype)
    engine.warm(_document(engine, num_tokens))


def ask(model: str, folder: str, num_tokens: int, bits: int, dtype: str | None) -> Restart:
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


def run_restart(
    model: str, num_tokens: int, bits: int, console: Console, *, dtype: str | None = None
) -> dict[str, object]:
    with (
        tempfile.TemporaryDirectory(prefix="kvboost-restart-") as folder,
        Progress("two processes, one after the other") as progress,
    ):
        arguments = (model, folder, num_tokens, bits, dtype)
        with progress.step("the first one reads a document", None):
            _in_a_process("read_document", *arguments)
        with progress.step("the second one is asked about it", None):
            answered = _in_a_process("ask", *arguments)
    restart = Restart(**json.loads(answered))
    sources = ", ".join(f"{count:,} {where}" for where, count in restart.tiers.items())
    console.print(
        f"{restart.num_tokens:,} prompt tokens ({sources}), {bits} bits: first token of the first "
        f"request after {restart.ttft_ms:.0f} ms, {restart.fetch_ms:.0f} of them waiting for the "
        f"disk; full prefill {restart.full_ms:.0f} ms: {restart.ratio:.2f} of it; "
        f"{'the same' if restart.same_answer else 'another'} answer",
        highlight=False,
    )
    return {
        "benchmark": "restart",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        **asdict(restart),
        "ratio": restart.ratio,
    }


def _document(engine: KVBoost, num_tokens: int) -> list[int]:
    return PATTERNS["code"].shared(fragments(engine.encode), num_tokens)


def _in_a_process(function: str, *arguments: object) -> str:
    """What ``function`` of this module gives, as JSON, in a process of its own."""
    program = (
        "import json, sys, dataclasses; from kvboost.bench import restart; "
        "name, *given = json.loads(sys.argv[1]); result = getattr(restart, name)(*given); "
        "print(json.dumps(result and dataclasses.asdict(result)))"
    )
    command = [sys.executable, "-c", program, json.dumps([function, *arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVBoostError(f"the process that should {function} failed:\n{done.stderr[-2000:]}")
    return done.stdout.strip().splitlines()[-1]
