"""``kvboost bench ttft``: patterns, lengths, a conversation, a decode step, other engines."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from rich.console import RenderableType

from kvboost import ConfigError, KVBoost, StockModel
from kvboost.bench.kit.benchmark import ROUNDS, Bench, ModelSettings, Report, option
from kvboost.bench.kit.tables import warning
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.engines import ENGINES
from kvboost.bench.peers.setting import prepare
from kvboost.bench.texts.prompts import PATTERNS, fragments
from kvboost.bench.ttft import report
from kvboost.bench.ttft.chat import ANSWER_TOKENS, QUESTION_TOKENS, TURNS, measure_chat
from kvboost.bench.ttft.patterns import (
    OPENING_TOKENS,
    Pooled,
    break_evens,
    measure_decode,
    measure_ttft,
)
from kvboost.bench.ttft.peers import (
    DOCUMENTS,
    INTRO_TOKENS,
    LENGTHS,
    PeerTime,
    measure_peers,
)
from kvboost.progress import Progress

CONVERSATIONS = 5
OPENING = 1024
"""Tokens with which a conversation begins."""
PEER_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {
        "patterns": ("code",),
        "tokens": (256, 512),
        "lengths": (128, 512),
        "rounds": 3,
        "turns": 8,
        "conversations": 1,
        "opening_tokens": 256,
        "peer_tokens": (512,),
    }

    patterns: tuple[str, ...] = option(
        tuple(PATTERNS), "Kind of prompt.", "pattern", choices=tuple(PATTERNS)
    )
    tokens: tuple[int, ...] = option((512, 1024, 2048), "Prompt lengths in tokens.")
    lengths: tuple[int, ...] = option(
        (128, 256, 512, 1024, 2048, 4096, 8191),
        "Prompt lengths of the curve and the break-even.",
        "length",
    )
    num_new: int = option(32, "How many tokens of a prompt are new.", "new", least=1)
    rounds: int = option(7, ROUNDS, least=1, most=50)
    turns: int = option(TURNS, "Turns of a conversation.", least=2, most=50)
    conversations: int = option(CONVERSATIONS, "Conversations.", least=1)
    opening_tokens: int = option(OPENING, "Tokens a conversation begins with.", least=1)
    peers: bool = option(False, "Measure every engine that make peers has set up.")
    engines: tuple[str, ...] = option(
        (), "Measure only these engines.", "peer", choices=tuple(ENGINES)
    )
    peer_tokens: tuple[int, ...] = option(LENGTHS, "Prompt lengths for the engines.")
    peer_rounds: int = option(PEER_ROUNDS, "Rounds of the engines.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = [(length, OPENING_TOKENS) for length in (*self.tokens, *self.lengths)]
        if self.chosen:
            lengths += [(length, INTRO_TOKENS + DOCUMENTS) for length in self.peer_tokens]
        for length, beside in lengths:
            if length <= self.num_new + beside:
                raise ConfigError(
                    f"tokens={length} must be more than the {self.num_new} new ones and {beside} "
                    "to begin with"
                )

    @property
    def chosen(self) -> tuple[str, ...]:
        """The engines to measure."""
        return self.engines or (tuple(ENGINES) if self.peers else ())

    def tokens_read(self) -> float:
        # A round costs about 2.4 full reads: stock, baseline, and the parts of the others.
        lengths = [*self.tokens * len(self.patterns), *self.lengths]
        talk = (self.opening_tokens + 48 * self.turns) * self.turns * (self.conversations + 1)
        peers = sum(self.peer_tokens) * 4 * (self.peer_rounds + 1) * len(self.chosen)
        return sum(lengths) * (2.4 * (self.rounds + 1) + 3) + 2.4 * talk + peers


def run(settings: Settings, bench: Bench) -> Report:
    rounds = settings.rounds
    with ExitStack() as stack:
        engine = stack.enter_context(bench.load_engine())
        opening = _opening_tokens(settings, engine)
        stock = StockModel.from_pretrained(
            settings.model, device=settings.device, dtype=settings.dtype
        )
        room = (engine.context_length or 1 << 30) - 1
        lengths = sorted({min(length, room) for length in settings.lengths})
        progress = stack.enter_context(Progress("contenders take turns"))
        peers = _start_peers(settings, engine, stack, progress)
        cells = len(settings.patterns) * len(settings.tokens) + 1
        with progress.step("rounds of patterns", cells * (rounds + 1)) as step:
            rows = [
                measure_ttft(engine, stock, pattern, length, settings.num_new, rounds, step.advance)
                for length in settings.tokens
                for pattern in settings.patterns
            ]
            decode = measure_decode(engine, stock, max(settings.tokens), rounds, step.advance)
        with progress.step("rounds of lengths", len(lengths) * (rounds + 1)) as step:
            points = [
                measure_ttft(engine, stock, "rag", length, settings.num_new, rounds, step.advance)
                for length in lengths
            ]
        total = (settings.conversations + 1) * settings.turns
        with progress.step("turns of conversations", total) as step:
            chat = measure_chat(
                engine,
                stock,
                peers,
                opening_tokens=opening,
                turns=settings.turns,
                conversations=settings.conversations,
                on_turn=step.advance,
            )
        peer_rows = _measure_peers(settings, engine, peers, progress)
    by_length = [[row for row in rows if row.num_tokens == length] for length in settings.tokens]
    pooled = [Pooled.of(group) for group in by_length]
    even = break_evens(points)
    shown: list[RenderableType] = [
        report.MEANINGS,
        report.ttft_table(rows, bench.console.width),
        report.pooled_table(pooled),
        report.decode_table(decode),
        report.ttft_table(points, bench.console.width),
    ]
    if max(settings.lengths) > room:
        shown.append(warning(f"prompts longer than {room:,} do not fit the model's context"))
    shown += [*report.break_even_lines(even, points[0].num_tokens), report.chat_table(chat)]
    if peers is not None:
        shown += [*peers.lines(), report.peers_table(peer_rows)]
    return Report(
        {
            "rounds": rounds,
            "rows": [row.as_json() for row in rows],
            "pooled": [vars(row) for row in pooled],
            "decode": decode.as_json(),
            "lengths": [point.as_json() for point in points],
            "break_even_tokens": even,
            "chat": chat.as_json(),
            "peers": [asdict(row) for row in peer_rows],
            **(peers.as_json() if peers is not None else {}),
        },
        shown,
        [
            report.faster_than_stock(pooled),
            report.faster_than_peers(peer_rows),
            report.faster_on_moved(peer_rows),
            report.flat_chat(chat),
            report.faster_together(decode),
        ],
        draw=partial(report.ttft_figure, points, peer_rows),
    )


def _start_peers(
    settings: Settings, engine: KVBoost, stack: ExitStack, progress: Progress
) -> Contenders | None:
    if not settings.chosen:
        return None
    device, dtype, threads = engine.device, engine.dtype, torch.get_num_threads()
    setting, vocabulary = prepare(settings.model, threads=threads, device=device, dtype=dtype)
    chosen = [ENGINES[name] for name in settings.chosen]
    peers = stack.enter_context(Contenders(chosen, setting, vocabulary.decode))
    peers.start(progress)
    return peers


def _opening_tokens(settings: Settings, engine: KVBoost) -> int:
    """Tokens a conversation begins with: as set, or what its turns leave of the context."""
    if engine.context_length is None:
        return settings.opening_tokens
    room = engine.context_length - settings.turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    if room < 1:
        raise ConfigError(
            f"turns={settings.turns} do not fit the model's context of "
            f"{engine.context_length:,}; choose fewer"
        )
    return min(settings.opening_tokens, room)


def _measure_peers(
    settings: Settings, engine: KVBoost, peers: Contenders | None, progress: Progress
) -> list[PeerTime]:
    if peers is None:
        return []
    limit = engine.context_length
    lengths = [length for length in settings.peer_tokens if limit is None or length < limit]
    encode, rounds = fragments(engine.encode), settings.peer_rounds
    with progress.step("rounds of engines", len(lengths) * (rounds + 1)) as step:
        return measure_peers(peers, encode, lengths, settings.num_new, rounds, step.advance)
