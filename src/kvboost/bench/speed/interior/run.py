"""``kvboost bench interior``: every engine on documents at every place, in turns."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import ClassVar

import torch
from rich.console import RenderableType
from rich.table import Table

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import ROUNDS, Bench, ModelSettings, Report, duration, option
from kvboost.bench.kit.figures import Figure, draw_bars
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.tables import dim, percent, spread, table, warning
from kvboost.bench.kit.timing import Sample
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.engines import ENGINES, OURS, OURS_PREFIX, OWN, colours
from kvboost.bench.peers.setting import prepare
from kvboost.bench.speed.interior.prompts import DOCUMENTS, INTERIOR, PLACES, Round, make_round
from kvboost.bench.texts.prompts import Unread
from kvboost.errors import ConfigError, KVBoostError
from kvboost.model.load import pick_device, pick_dtype
from kvboost.progress import Progress

BESIDE = 200
"""Tokens of a prompt that are not documents: openings, other text, the question."""
AT_TOKENS = 2048
FASTER = 3.0
NOTE = dim(
    "ms to the first token, median [lowest-highest]; reused: known tokens that were not computed, "
    "– where the engine does not tell.\nkvboost's moved text is repaired, not exact (kvboost "
    "quality says how close); all else is exact, or as exact as its engine."
)


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"engines": OWN, "tokens": 768, "rounds": 2}

    engines: tuple[str, ...] = option(
        tuple(ENGINES), "Measure only these engines.", "peer", choices=tuple(ENGINES)
    )
    tokens: int = option(AT_TOKENS, "Tokens of a prompt, about.", least=BESIDE + 64 * DOCUMENTS)
    rounds: int = option(5, ROUNDS, least=1, most=50)
    peer_seconds: float = option(
        240.0, "Time of one engine; after that it skips the other rounds.", "seconds", least=1
    )

    @property
    def document_tokens(self) -> int:
        return (self.tokens - BESIDE) // DOCUMENTS


@dataclass(frozen=True)
class Row:
    """One engine at one place of the documents."""

    engine: str
    place: str
    num_tokens: int
    ttft: Sample
    rounds: int
    reused_share: float | None
    """Of the tokens that were read before, those it did not compute; None where it cannot tell."""


def run(settings: Settings, bench: Bench) -> Report:
    place = pick_device(settings.device)
    kind = pick_dtype(settings.dtype, place)
    setting, vocabulary = prepare(
        settings.model,
        threads=torch.get_num_threads(),
        device=str(place),
        dtype=str(kind).removeprefix("torch."),
    )
    if settings.tokens + BESIDE > setting.context_length:
        raise ConfigError(
            f"tokens={settings.tokens} does not fit the model's context of "
            f"{setting.context_length:,} with {BESIDE} to spare; choose fewer"
        )
    bench.describe(place, kind)
    most = len(settings.engines) * settings.peer_seconds
    bench.say(f"at most {duration(most)}, plus the time engines take to load")
    unread = Unread(vocabulary.encode)
    rounds = [
        make_round(vocabulary.encode, unread, number, settings.document_tokens)
        for number in range(settings.rounds + 1)
    ]
    chosen = [ENGINES[name] for name in settings.engines]
    with (
        Contenders(chosen, setting, vocabulary.decode) as contenders,
        Progress("documents at other places, engines in turns") as progress,
    ):
        contenders.start(progress)
        with progress.step("rounds", len(rounds)) as step:
            rows = measure_interior(
                contenders, rounds, most_seconds=settings.peer_seconds, on_round=step.advance
            )
    for line in contenders.lines():
        bench.console.print(line)
    if not rows:
        raise KVBoostError("none of the chosen engines could be measured")
    best = against_best(rows)
    return Report(
        {
            **contenders.as_json(),
            "rows": [asdict(row) for row in rows],
            "against_best": {
                where: {"peer": name, "times_ours": ratio} for where, (name, ratio) in best.items()
            },
        },
        [interior_table(rows), NOTE, *notes(rows, best, settings.rounds)],
        [goal(best, settings.tokens)],
        draw=partial(interior_figure, rows),
    )


def measure_interior(
    contenders: Contenders,
    rounds: Sequence[Round],
    *,
    most_seconds: float = 240.0,
    on_round: Callable[[], None] = lambda: None,
) -> list[Row]:
    """In each round every engine reads the documents (not timed) and is then asked the same
    prompt, place by place. The first round warms up and does not count. An engine that has used
    ``most_seconds`` skips the later rounds, so that a run ends."""
    seen: dict[tuple[str, str], list[tuple[float, int, float | None]]] = defaultdict(list)
    spent: dict[str, float] = defaultdict(float)
    for number, one in enumerate(rounds):
        names = [name for name in contenders.names if spent[name] <= most_seconds]
        for name in names:
            answer = contenders.ask(name, one.read)
            spent[name] += answer.total_ms / 1e3 if answer else 0.0
        for at, (place, prompt) in enumerate(one.prompts.items()):
            for name in names if (number + at) % 2 else reversed(names):
                answer = contenders.ask(name, prompt.ids)
                if answer is None:
                    continue
                spent[name] += answer.total_ms / 1e3
                if number:
                    told = answer.cached_tokens
                    share = None if told is None else min(1.0, told / prompt.known_tokens)
                    seen[name, place].append((answer.ttft_ms, len(prompt.ids), share))
        on_round()
    return [
        _row(name, place, seen[name, place])
        for place in PLACES
        for name in contenders.described
        if seen[name, place] and name not in contenders.failures
    ]


def _row(engine: str, place: str, seen: Sequence[tuple[float, int, float | None]]) -> Row:
    times, lengths, told = zip(*seen, strict=True)
    shares = [share for share in told if share is not None]
    share = statistics.median(shares) if shares else None
    length = round(statistics.median(lengths))
    return Row(engine, place, length, Sample.of(list(times)), len(seen), share)


def against_best(rows: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """By place: the fastest other engine, and how many times our time it took."""
    found = {}
    for place in PLACES:
        times = {row.engine: row.ttft.median_ms for row in rows if row.place == place}
        others = {name: ms for name, ms in times.items() if name not in (OURS, OURS_PREFIX)}
        if OURS in times and others:
            best = min(others, key=lambda name: others[name])
            found[place] = best, others[best] / times[OURS]
    return found


def goal(best: Mapping[str, tuple[str, float]], tokens: int) -> Goal:
    """Judged on prompts of ``AT_TOKENS`` and longer: a short prompt is soon read."""
    (text,) = BENCHMARKS["interior"].goals
    chosen = {place: best[place] for place in INTERIOR if place in best}
    if not chosen:
        return Goal(text, None, "not measured")
    told = ", ".join(f"{place} {ratio:.1f} × ({name})" for place, (name, ratio) in chosen.items())
    met = min(ratio for _, ratio in chosen.values()) >= FASTER if tokens >= AT_TOKENS else None
    return Goal(text, met, f"at {tokens:,} tokens: {told}")


def notes(
    rows: Sequence[Row], best: Mapping[str, tuple[str, float]], planned: int
) -> Iterator[RenderableType]:
    """``planned``: the rounds of the run, if there was time for all."""
    for place, (name, ratio) in best.items():
        yield f"{place}: {ratio:.1f} × the best other ({name})"
    for engine in dict.fromkeys(row.engine for row in rows):
        counted = min(row.rounds for row in rows if row.engine == engine)
        if counted < planned:
            yield warning(f"{engine} was too slow for {planned} rounds; {counted} counted")


def interior_table(rows: Sequence[Row]) -> Table:
    """A block of engines per place."""
    lines = []
    for place in PLACES:
        here = [row for row in rows if row.place == place]
        ours = next((row.ttft.median_ms for row in here if row.engine == OURS), None)
        for at, row in enumerate(here):
            times = "" if ours is None else f"{row.ttft.median_ms / ours:.1f}"
            name = "" if at else place
            lines.append((name, row.engine, spread(row.ttft), percent(row.reused_share), times))
    longest = max(row.num_tokens for row in rows)
    title = f"documents that were read before, about {longest:,} tokens"
    return table(title, ("place", "engine"), ("ms", "reused", "× ours"), lines)


def interior_figure(rows: Sequence[Row], title: str) -> Figure:
    """A group of bars per place, a bar per engine, on a log axis; above it the share of known
    text that was reused, where the engine tells."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    bars = {
        engine: {row.place: row.ttft for row in rows if row.engine == engine} for engine in engines
    }
    shares = {
        (row.engine, row.place): percent(row.reused_share)
        for row in rows
        if row.reused_share is not None
    }
    return draw_bars(
        {"": bars},
        title=title,
        y=["time to first token, ms (%: known text reused)"],
        log_y=True,
        notes=shares,
        colours=colours(engines),
    )
