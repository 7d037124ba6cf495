"""A made-up session of a coding agent: its turns, server by server.

Each turn sends everything again: the list of tools, the files and the history, which has grown or
has changed in its middle (see texts/agent.py). The answer is a call of a tool, held to its JSON
schema. Then the agent waits as long as a tool would run; our server may heal in that time. All
servers run, and each is frozen while another takes its turn.
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from rich.table import Table

from kvboost.bench.agent.settings import LEAST_TURNS, MADE_UP, Settings
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Bench, Report
from kvboost.bench.kit.figures import Figure, Lines, Value, draw_lines
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.tables import dim, ms, percent, table
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import OURS, RIVAL, SYSTEMS, KVBoostServer
from kvboost.bench.peers.setting import Setting, Vocabulary, prepare
from kvboost.bench.serve.clients import SOURCES, Answer, Target, ask
from kvboost.bench.serve.connection import Connection
from kvboost.bench.serve.report import problems
from kvboost.bench.serve.run import describe_systems, find_systems, given_up, rotated
from kvboost.bench.texts.agent import LAYOUTS, Session
from kvboost.errors import KVBoostError
from kvboost.progress import Progress, Step

MAX_TOKENS = 160
"""More than any call takes, so that its JSON ends."""
WARM_TURNS = 3
_LEFT_OUT = ("sent_s", "gaps_s", "text", "error", "moved_tokens", "first_logprobs")
"""Of an answer, in the record."""
NOTE = dim(
    "ms by the client's clock, summed over the turns; first token: from sending to the first "
    "text.\ncached: prompt tokens that the server says it did not compute.\nRows of ours: moved "
    "ones come from another place, and some of them are recomputed; approximate ones follow\n"
    "moved ones in a text that was read before; healed ones became exact while a tool ran."
)


@dataclass(frozen=True)
class Played:
    """One turn of one session."""

    answer: Answer
    healed_tokens: int | None
    """Rows that became exact while the tool ran after this turn; None for other servers."""


@dataclass
class Row:
    """One system in one layout: its sessions, round by round."""

    system: str
    layout: str
    sessions: list[list[Played]] = field(default_factory=list)

    def total(self, name: str) -> float:
        """``ttft_s`` or ``total_s`` of a whole session in ms, the median of the rounds."""
        sums = [sum(getattr(one.answer, name) for one in session) for session in self.sessions]
        return 1e3 * float(statistics.median(sums))

    def turn(self, number: int) -> Value:
        """The first token of one turn, with the lowest and the highest of the rounds."""
        found = [1e3 * (session[number].answer.ttft_s or 0.0) for session in self.sessions]
        return Value(statistics.median(found), min(found), max(found))

    def tokens(self, name: str) -> int:
        """``prompt_tokens`` and the like over a session, on average."""
        every = sum(getattr(one.answer, name) for session in self.sessions for one in session)
        return int(every / len(self.sessions))

    def rows(self) -> dict[str, int]:
        """Rows by source over a session, on average; those of others are not known."""
        every = [one for session in self.sessions for one in session if one.answer.rows]
        count = len(self.sessions)
        found = {name: sum(one.answer.rows[name] for one in every) // count for name in SOURCES}
        found["healed"] = sum(one.healed_tokens or 0 for one in every) // count
        return found if every else {}

    def as_json(self) -> dict[str, Any]:
        return {
            "system": self.system,
            "layout": self.layout,
            "ttft_ms": self.total("ttft_s"),
            "total_ms": self.total("total_s"),
            "prompt_tokens": self.tokens("prompt_tokens"),
            "completion_tokens": self.tokens("completion_tokens"),
            "cached_tokens": self.tokens("cached_tokens"),
            "rows": self.rows(),
            "turns_ttft_ms": [self.turn(at).middle for at in range(len(self.sessions[0]))],
            "sessions": [[_told(one) for one in session] for session in self.sessions],
        }


def run(settings: Settings, bench: Bench) -> Report:
    setting, vocabulary = prepare(
        settings.model,
        threads=settings.threads,
        device=torch.device(settings.device),
        vllm=settings.vllm,
    )
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    systems = settings.systems or MADE_UP
    present, missing = find_systems(systems, setting, bench)
    comparison = Comparison(settings, setting, vocabulary, systems)
    with Progress("an agent's turns, one server at a time") as progress:
        comparison.run(present, progress)
    rows = comparison.rows
    return Report(
        {
            "systems": describe_systems(present, setting, comparison.started_s),
            "missing": missing,
            "failures": comparison.failures,
            "rows": [row.as_json() for row in rows],
        },
        [*tables(rows), NOTE, *problems({}, comparison.failures)],
        goals(rows),
        draw=lambda title: figure(rows, title),
    )


class Comparison:
    """The rounds of a run, and what they gave."""

    def __init__(
        self, settings: Settings, setting: Setting, vocabulary: Vocabulary, systems: Sequence[str]
    ) -> None:
        self.failures: dict[str, str] = {}
        """Why a system was given up, by its name."""
        self.started_s: dict[str, float] = {}
        self._rows = {
            (layout, system): Row(system, layout)
            for layout in settings.layouts
            for system in systems
        }
        self._settings = settings
        self._setting = setting
        self._count = vocabulary.count
        self._players: dict[str, Player] = {}

    @property
    def rows(self) -> list[Row]:
        """Those of systems that were not given up, layout by layout. All sessions of a layout have
        as many turns as its shortest one."""
        found = [
            row for row in self._rows.values() if row.sessions and row.system not in self.failures
        ]
        for own in _by_layout(found).values():
            turns = min(len(session) for row in own for session in row.sessions)
            for row in own:
                row.sessions = [session[:turns] for session in row.sessions]
        return found

    def run(self, present: Sequence[str], progress: Progress) -> None:
        """Every session. A system that fails is given up; the others go on."""
        asked = self._settings
        with ExitStack() as stack:
            for name in present:
                with progress.step(f"starting {name}"), given_up(self.failures, name):
                    there = stack.enter_context(running(SYSTEMS[name], self._setting, may_end=True))
                    stack.callback(there.thaw)
                    there.freeze()
                    self.started_s[name] = there.started_s
                    self._players[name] = Player(there, isinstance(SYSTEMS[name], KVBoostServer))
            share = 60 * asked.minutes / (len(asked.layouts) * asked.rounds)
            for layout in asked.layouts:
                warm = Session(layout, WARM_TURNS, f"{asked.seed} warm-up", self._count)
                with progress.step(f"{layout}: warm-up"):
                    self._play(warm, 0)
                for number in range(asked.rounds):
                    session = Session(layout, asked.turns, str(asked.seed + number), self._count)
                    with progress.step(f"{layout}: round {number + 1}", asked.turns) as step:
                        until = time.monotonic() + share
                        for name, played in self._play(session, number, step, until).items():
                            self._rows[layout, name].sessions.append(played)

    def _play(
        self, session: Session, number: int, step: Step | None = None, until: float = math.inf
    ) -> dict[str, list[Played]]:
        """The turns of ``session``, in each of which all servers take theirs; none but the first
        two begins after ``until``."""
        played: dict[str, list[Played]] = {name: [] for name in self._players}
        for turn in range(len(session.turns)):
            if turn >= LEAST_TURNS and time.monotonic() > until:
                break
            for name in rotated(list(played), number + turn):
                with given_up(self.failures, name):
                    done = played[name]
                    done.append(
                        self._players[name].take_turn(session, done, self._settings.tool_seconds)
                    )
            for name in self.failures:
                self._players.pop(name, None)
                played.pop(name, None)
            if step is not None:
                step.advance()
        return played


@dataclass(frozen=True)
class Player:
    """Sends turns to one server, which is frozen between them."""

    server: Running
    is_ours: bool

    def take_turn(self, session: Session, done: Sequence[Played], tool_seconds: float) -> Played:
        """The turn after ``done``. Raises ``KVBoostError`` if it is not answered: what follows
        would be another conversation."""
        with self.server.thawed():
            return asyncio.run(self._ask(session, done, tool_seconds))

    async def _ask(self, session: Session, done: Sequence[Played], tool_seconds: float) -> Played:
        answer = Answer(0.0)
        call = _call(session.turns[len(done)].schema)
        target = Target(self.server.url, self.server.model, MAX_TOKENS, more=call)
        messages = session.messages([one.answer.text for one in done])
        with closing(Connection(self.server.url)) as connection:
            await ask(connection, target, messages, answer)
            if answer.error is not None:
                raise KVBoostError(f"turn {len(done) + 1} failed: {answer.error}")
            before = await self._healed(connection)
            await asyncio.sleep(tool_seconds)
            healed = await self._healed(connection) - before
        return Played(answer, healed if self.is_ours else None)

    async def _healed(self, connection: Connection) -> int:
        """Rows that our server has healed since it started."""
        if not self.is_ours:
            return 0
        said = b"".join([line async for line in connection.lines("GET", "/kvboost/live")])
        return int(json.loads(said)["healing"]["healed_tokens"])


def tables(rows: Sequence[Row]) -> Iterator[Table]:
    for layout, own in _by_layout(rows).items():
        first = own[0]
        turns = len(first.sessions[0])
        last = first.sessions[0][-1].answer.prompt_tokens
        yield table(
            f"{layout}: {turns} turns, the last of {last:,} tokens; "
            f"medians of {len(first.sessions)} rounds",
            ("system",),
            ("first token", "last turn's", "total", "tokens out", "cached"),
            map(_cells, own),
        )
        if any(row.rows() for row in own):
            yield table(
                f"{layout}: rows of all prompts by source",
                ("system",),
                (*SOURCES, "healed"),
                (
                    [row.system, *(f"{one:,}" for one in row.rows().values())]
                    for row in own
                    if row.rows()
                ),
            )


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Whether the first tokens of a session together come no later than vLLM's."""
    found = {(row.layout, row.system): row.total("ttft_s") for row in rows}
    made = []
    for layout, text in zip(LAYOUTS, BENCHMARKS["agent"].goals, strict=True):
        ours, theirs = found.get((layout, OURS)), found.get((layout, RIVAL))
        if ours is None or theirs is None:
            made.append(Goal(text, None, "not measured"))
        else:
            made.append(Goal(text, ours <= theirs, f"{ours:,.0f} ms, {ours / theirs:.2f} of it"))
    return made


def figure(rows: Sequence[Row], title: str) -> Figure:
    """The first token of every turn; a panel per layout, a line per system."""
    panels: dict[str, Lines] = {
        layout: {
            row.system: [(at + 1, row.turn(at)) for at in range(len(row.sessions[0]))]
            for row in own
        }
        for layout, own in _by_layout(rows).items()
    }
    return draw_lines(panels, title=title, x="turn", y="ms to the first token")


def _by_layout(rows: Sequence[Row]) -> dict[str, list[Row]]:
    names = dict.fromkeys(row.layout for row in rows)
    return {name: [row for row in rows if row.layout == name] for name in names}


def _cells(row: Row) -> list[str]:
    cached = row.tokens("cached_tokens") / max(1, row.tokens("prompt_tokens"))
    return [
        row.system,
        *(ms(row.total("ttft_s")), ms(row.turn(-1).middle), ms(row.total("total_s"))),
        *(f"{row.tokens('completion_tokens'):,}", percent(cached)),
    ]


def _call(schema: Mapping[str, Any]) -> dict[str, Any]:
    held = {"name": "call", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": held}}


def _told(one: Played) -> dict[str, Any]:
    known = asdict(one.answer) | {"healed_tokens": one.healed_tokens}
    return {name: value for name, value in known.items() if name not in _LEFT_OUT}
