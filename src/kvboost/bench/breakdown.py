"""Where the time of one request goes: its phases, without reuse, after an exact hit, after a move.

Every prompt is text, so reading it into tokens counts; two tokens are generated, so that one decode
step does. The phases are the request's own; the outside clock beside them says what they miss.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.plots import check_plot
from kvboost.bench.record import record
from kvboost.bench.study_plots import plot_breakdown
from kvboost.bench.study_report import breakdown_tables
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import MAX_QUESTIONS, PATTERNS, QUESTIONS, fragments
from kvboost.config import whole, within
from kvboost.progress import Progress
from kvboost.results import PHASES, Timings

CASES = {
    "baseline": "nothing is reused and nothing is kept",
    "exact": "all but the question was read before, in its place",
    "moved": "every passage was read before, at another place",
}
PASSAGE_TOKENS = 250
NEW_TOKENS = 2
LEAST_PASSAGES = 4
LEAST_TOKENS = 100 * LEAST_PASSAGES
"""Shorter passages would be read again rather than moved."""
HEADER = "Answer from the passages below and from nothing else.\n\n"


@dataclass(frozen=True)
class Breakdown:
    """Of one case at one length. The medians of phases add up to that of the whole only nearly."""

    case: str
    tokens: int
    prompt_tokens: int
    """As it came out: text, so not to the token."""
    not_computed: float
    """Share of the prompt's rows."""
    phases: dict[str, float]
    """Median milliseconds."""
    ttft: Sample
    outside: Sample
    """The whole call, by a clock around it."""
    unaccounted_ms: float
    """Median of what the outside clock has more than the phases together."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class _Seen:
    """What the counted rounds of one case gave."""

    def __init__(self) -> None:
        self.results: list[GenerationResult] = []
        self.outside: list[float] = []

    def breakdown(self, case: str, tokens: int, outside: Sample) -> Breakdown:
        times = [result.timings for result in self.results]
        phases = {
            phase: statistics.median(getattr(one, f"{phase}_ms") for one in times)
            for phase in PHASES
        }
        missing = [
            whole_ms - phase_sum(one) for whole_ms, one in zip(self.outside, times, strict=True)
        ]
        return Breakdown(
            case,
            tokens,
            round(statistics.median(result.prompt_tokens for result in self.results)),
            statistics.median(result.kv_reuse_ratio for result in self.results),
            {phase: ms for phase, ms in phases.items() if phase != "queue"},
            Sample.of([one.ttft_ms for one in times]),
            outside,
            statistics.median(missing),
        )


def phase_sum(timings: Timings) -> float:
    return float(sum(getattr(timings, f"{phase}_ms") for phase in PHASES))


def measure_breakdown(
    engine: KVBoost,
    tokens: int,
    rounds: int = 7,
    on_round: Callable[[], None] = lambda: None,
) -> list[Breakdown]:
    """The three cases, interleaved. The engine must reuse moved text always."""
    passages = _passages(engine, tokens)
    in_order = HEADER + "".join(passages)
    exact, moved = "breakdown-exact", "breakdown-moved"
    engine.warm(engine.encode(in_order), cache_salt=exact)
    for passage in passages:
        engine.warm(engine.encode(HEADER + passage), cache_salt=moved)
    seen = {case: _Seen() for case in CASES}

    def asked(number: int) -> str:
        return f"\n{number}: {QUESTIONS[number % len(QUESTIONS)]}\n"

    def shuffled(number: int) -> str:
        order = random.Random(number).sample(passages, len(passages))
        return f"Request {number}. {HEADER}" + "".join(order)  # not even the beginning is in place

    def ask(case: str, text: Callable[[int], str], mode: GenerationMode, salt: str) -> Contender:
        def run(number: int) -> None:
            prompt = text(number) + asked(number)
            start = time.perf_counter()
            result = engine.generate(prompt, NEW_TOKENS, mode, cache_salt=salt, ignore_eos=True)
            elapsed = (time.perf_counter() - start) * 1e3
            if number:  # round 0 warms up
                seen[case].results.append(result)
                seen[case].outside.append(elapsed)

        return Contender(run)

    modes = GenerationMode
    times = interleave(
        {
            "baseline": ask("baseline", lambda _: in_order, modes.BASELINE, exact),
            "exact": ask("exact", lambda _: in_order, modes.PREFIX_CACHE, exact),
            "moved": ask("moved", shuffled, modes.CHUNK_KV_REUSE, moved),
        },
        rounds,
        on_round,
    )
    for salt in (exact, moved):
        engine.forget_salt(salt)
    return [seen[case].breakdown(case, tokens, times[case]) for case in CASES]


def run_breakdown(
    model: str,
    lengths: Sequence[int],
    rounds: int,
    console: Console,
    *,
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    for length in lengths:
        whole(length, LEAST_TOKENS, "tokens")
    within(rounds, 1, MAX_QUESTIONS - 1, "rounds")
    if plot is not None:
        check_plot(plot)
    with KVBoost.from_pretrained(model, device=device, dtype=dtype, reuse_moved="always") as engine:
        machine = describe(engine.device, engine.dtype)
        console.print(machine)
        with (
            Progress("three cases, interleaved") as progress,
            progress.step("rounds", len(lengths) * (rounds + 1)) as step,
        ):
            rows = [
                row
                for length in lengths
                for row in measure_breakdown(engine, length, rounds, step.advance)
            ]
    for case, meaning in CASES.items():
        console.print(f"{case:9} {meaning}", style="dim", highlight=False)
    for table in breakdown_tables(rows):
        console.print(table)
    if plot is not None:
        plot_breakdown(rows, plot, title=f"{model}: where the time of a request goes")
        console.print(f"drawn in {plot}", highlight=False)
    rows_json = [row.as_json() for row in rows]
    return record("breakdown", model, machine, rounds=rounds, rows=rows_json)


def _passages(engine: KVBoost, num_tokens: int) -> list[str]:
    """Text of about ``num_tokens`` in passages of equal length, each a paragraph of its own."""
    count = max(LEAST_PASSAGES, num_tokens // PASSAGE_TOKENS)
    size = num_tokens // count
    ids = PATTERNS["rag"].shared(fragments(engine.encode), count * size)
    starts = range(0, count * size, size)
    return [engine.decode(ids[start : start + size]).strip() + "\n\n" for start in starts]
