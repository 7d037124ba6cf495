"""A whole run of ``kvboost bench ttft``: load, measure, show, and return what a script wants."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

import torch
from rich.console import Console

from kvboost import ConfigError, GenerationMode, KVBoost, StockModel
from kvboost.bench.goals import show_goals
from kvboost.bench.machine import describe
from kvboost.bench.peers.crew import Crew
from kvboost.bench.peers.engines import ENGINES
from kvboost.bench.peers.report import crew_json, show_crew
from kvboost.bench.peers.setting import prepare
from kvboost.bench.plots import check_plot
from kvboost.bench.ttft import report
from kvboost.bench.ttft.chat import ANSWER_TOKENS, QUESTION_TOKENS, TURNS, measure_chat
from kvboost.bench.ttft.clock import ClockCheck, check_clock
from kvboost.bench.ttft.goals import goals
from kvboost.bench.ttft.lengths import WORDS, Beginning, break_evens, measure_lengths, texts_for
from kvboost.bench.ttft.patterns import (
    OPENING_TOKENS,
    Pooled,
    measure_decode,
    measure_ttft,
    rounds_of,
)
from kvboost.bench.ttft.peers import LENGTHS, PeerTime, measure_peers, peer_break_evens
from kvboost.bench.ttft.plot import curves, plot_ttft
from kvboost.bench.workloads import PATTERNS, fragments
from kvboost.config import one_of, whole
from kvboost.progress import Progress


@dataclass(frozen=True)
class Plan:
    """What is measured. Validated on creation."""

    model: str
    patterns: tuple[str, ...] = tuple(PATTERNS)
    tokens: tuple[int, ...] = (512, 1024, 2048)
    words: tuple[int, ...] = WORDS
    num_new: int = 32
    rounds: int = 7
    turns: int = TURNS
    conversations: int = 5
    opening_tokens: int = 1024
    """With which a conversation begins."""
    engines: tuple[str, ...] = ()
    """Behind the pipe; none by default."""
    peer_tokens: tuple[int, ...] = LENGTHS
    peer_rounds: int = 3

    def __post_init__(self) -> None:
        for pattern in self.patterns:
            if pattern not in PATTERNS:
                known = ", ".join(PATTERNS)
                raise ConfigError(f"pattern={pattern!r} is unknown; choose among {known}")
        for length in (*self.tokens, *(self.peer_tokens if self.engines else ())):
            if length <= self.num_new + OPENING_TOKENS:
                raise ConfigError(
                    f"tokens={length} must be more than the {self.num_new} new ones and "
                    f"{OPENING_TOKENS} of an opening"
                )
        for engine in self.engines:
            one_of(engine, tuple(ENGINES), "peer")
        for option in ("num_new", "rounds", "conversations", "opening_tokens", "peer_rounds"):
            whole(getattr(self, option), 1, option)
        whole(self.turns, 2, "turns")
        for words in self.words:
            whole(words, 50, "words")


def run_ttft(
    plan: Plan,
    console: Console,
    *,
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Patterns, lengths, a conversation, one decode step, and other engines if any are chosen."""
    if plot is not None:
        check_plot(plot)
    engine = KVBoost.from_pretrained(plan.model, device=device, dtype=dtype)
    stock = StockModel.from_pretrained(plan.model, device=device, dtype=dtype)
    machine = describe(engine.device, engine.dtype)
    console.print(machine)
    texts = texts_for(engine, plan.words, plan.num_new)
    opening = _opening_tokens(plan, engine)
    with ExitStack() as stack:
        stack.enter_context(engine)
        progress = stack.enter_context(Progress("measuring, interleaved"))
        crew = _crew(plan, engine, stack, progress)
        with progress.step("patterns", rounds_of(plan.patterns, plan.tokens, plan.rounds)) as step:
            rows = [
                measure_ttft(
                    engine, stock, pattern, length, plan.num_new, plan.rounds, step.advance
                )
                for length in plan.tokens
                for pattern in plan.patterns
            ]
            decode = measure_decode(engine, stock, max(plan.tokens), plan.rounds, step.advance)
        with progress.step("lengths", len(texts) * (plan.rounds + 1)) as step:
            points = measure_lengths(engine, stock, texts, plan.num_new, plan.rounds, step.advance)
        total = (plan.conversations + 1) * plan.turns
        with progress.step(f"a conversation of {plan.turns} turns", total) as step:
            chat = measure_chat(
                engine,
                stock,
                crew,
                opening_tokens=opening,
                turns=plan.turns,
                conversations=plan.conversations,
                on_turn=step.advance,
            )
        clock = _check_clock(engine, texts)
        peers = _measure_peers(plan, engine, crew, progress)
    by_length = [[row for row in rows if row.num_tokens == length] for length in plan.tokens]
    pooled = [Pooled.of(group) for group in by_length]
    even, peers_even = break_evens(points), peer_break_evens(peers)

    report.explain_ttft(console)
    console.print("", report.ttft_table(rows, console.width))
    console.print("", report.pooled_table(pooled))
    console.print("", report.decode_table([decode]))
    console.print("", report.lengths_table(points))
    if texts[-1].words not in plan.words:
        limit = engine.context_length
        console.print(f"longer ones do not fit the model's context of {limit:,}", style="yellow")
    report.show_break_evens(console, even, points[0].num_tokens)
    console.print("", report.chat_table(chat))
    if crew is not None:
        show_crew(console, crew)
        console.print("", report.peers_table(peers))
        report.show_break_evens(console, peers_even, min(plan.peer_tokens))
    report.show_clock(console, clock)
    reached = goals(pooled, chat, peers)
    show_goals(console, reached)
    if plot is not None:
        title = f"{plan.model}, {machine['dtype']}, {machine.get('gpu', machine['cpu'])}"
        plot_ttft(curves(points, peers), plot, title=title)
        console.print(f"drawn in {plot}", highlight=False)
    return {
        "benchmark": "ttft",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": plan.model,
        "machine": machine,
        "rounds": plan.rounds,
        "rows": [row.as_json() for row in rows],
        "pooled": [vars(row) for row in pooled],
        "decode": decode.as_json(),
        "lengths": [point.as_json() for point in points],
        "break_even_tokens": {**even, **{f"{name}, warm": at for name, at in peers_even.items()}},
        "chat": chat.as_json(),
        "clock": {name: check.as_json() for name, check in clock.items()},
        "peers": [row.as_json() for row in peers],
        **(crew_json(crew) if crew is not None else {}),
        "goals": [asdict(goal) for goal in reached],
    }


def _crew(plan: Plan, engine: KVBoost, stack: ExitStack, progress: Progress) -> Crew | None:
    if not plan.engines:
        return None
    dtype = str(engine.dtype).removeprefix("torch.")
    setting, vocabulary = prepare(
        plan.model, threads=torch.get_num_threads(), device=str(engine.device), dtype=dtype
    )
    chosen = [ENGINES[name] for name in plan.engines]
    crew = stack.enter_context(Crew(chosen, setting, vocabulary.decode))
    crew.start(progress)
    return crew


def _opening_tokens(plan: Plan, engine: KVBoost) -> int:
    """With which a conversation begins: as planned, or what its turns leave of the context."""
    if engine.context_length is None:
        return plan.opening_tokens
    room = engine.context_length - plan.turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    if room < 1:
        raise ConfigError(
            f"turns={plan.turns} do not fit the model's context of {engine.context_length:,}; "
            "choose fewer"
        )
    return min(plan.opening_tokens, room)


def _check_clock(engine: KVBoost, texts: Sequence[Beginning]) -> dict[str, ClockCheck]:
    """On a text of middling length, new and known."""
    ids, salt = texts[len(texts) // 2].ids, "clock"
    engine.warm(ids[:-1], cache_salt=salt)
    modes = (GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE, GenerationMode.CHUNK_KV_REUSE)
    checks = {mode.value: check_clock(engine, ids, mode, cache_salt=salt) for mode in modes}
    engine.forget_salt(salt)
    return checks


def _measure_peers(
    plan: Plan, engine: KVBoost, crew: Crew | None, progress: Progress
) -> list[PeerTime]:
    if crew is None:
        return []
    limit = engine.context_length
    lengths = [length for length in plan.peer_tokens if limit is None or length < limit]
    total = len(lengths) * (plan.peer_rounds + 1)
    with progress.step("engines, cold and warm", total) as step:
        return measure_peers(
            crew, fragments(engine.encode), lengths, plan.num_new, plan.peer_rounds, step.advance
        )
