"""The figures of a load: latencies and rates of one round, medians over rounds, and our goals."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.figures import Value
from kvboost.bench.kit.goals import Goal
from kvboost.bench.peers.servers import OURS, RIVAL
from kvboost.bench.serve.clients import Answer
from kvboost.bench.serve.costs import Costs

RAG_TTFT = 0.4
"""The most of the rival's median time to first token, on passages in changing order."""
RAG_SOON, RAG_MANY, CHAT_SOON, CHAT_MANY = BENCHMARKS["serve"].goals


@dataclass(frozen=True)
class Round:
    """One load on one server. Latencies and shares of prompt tokens, as the server counts them, are
    of requests that were answered."""

    requests: float
    errors: float
    seconds: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    itl_p50_ms: float
    """Inter-token latency: from one piece of text to the next, all requests together."""
    itl_p95_ms: float
    requests_per_s: float
    prompt_tokens: float
    """Of a request, on average; so are the tokens of an answer."""
    completion_tokens: float
    cached_share: float
    moved_share: float
    """Ours only: the part of it that was reused from another place."""
    beyond_server_p50_ms: float
    """Ours only: how long after the server's own clock the first token arrives at the client."""
    loop_cpu_ms: float | None
    """Ours only: processor time of the server's loop for one answer."""
    process_cpu_ms: float | None
    """Processor time of all of the server's processes for one answer."""
    gpu_share: float | None
    """The share of time that the card was busy."""

    @classmethod
    def of(cls, answers: Sequence[Answer], costs: Costs) -> Round:
        """Needs at least one request that was answered."""
        good = [answer for answer in answers if answer.error is None]
        ttft = [1e3 * answer.ttft_s for answer in good if answer.ttft_s is not None]
        gaps = [1e3 * gap for answer in good for gap in answer.gaps_s] or [0.0]
        begun = min(answer.sent_s for answer in answers)
        seconds = max(answer.sent_s + answer.total_s for answer in answers) - begun
        prompts = sum(answer.prompt_tokens for answer in good)
        completions = sum(answer.completion_tokens for answer in good)
        return cls(
            requests=len(answers),
            errors=len(answers) - len(good),
            seconds=seconds,
            ttft_p50_ms=float(np.percentile(ttft, 50)),
            ttft_p95_ms=float(np.percentile(ttft, 95)),
            itl_p50_ms=float(np.percentile(gaps, 50)),
            itl_p95_ms=float(np.percentile(gaps, 95)),
            requests_per_s=len(good) / seconds,
            prompt_tokens=prompts / len(good),
            completion_tokens=completions / len(good),
            cached_share=sum(answer.cached_tokens for answer in good) / max(1, prompts),
            moved_share=sum(answer.moved_tokens for answer in good) / max(1, prompts),
            beyond_server_p50_ms=float(np.percentile(_beyond_server_ms(good) or [0.0], 50)),
            loop_cpu_ms=None if costs.loop_s is None else 1e3 * costs.loop_s / len(good),
            process_cpu_ms=None if costs.process_s is None else 1e3 * costs.process_s / len(good),
            gpu_share=costs.gpu_share,
        )


@dataclass(frozen=True)
class Row:
    """One system under one workload: the median of every figure over the rounds."""

    system: str
    workload: str
    users: int
    rounds: tuple[Round, ...]
    median: Round

    @classmethod
    def of(cls, system: str, workload: str, users: int, rounds: Sequence[Round]) -> Row:
        values = {
            one.name: [getattr(round_, one.name) for round_ in rounds] for one in fields(Round)
        }
        median = Round(**{name: _median(found) for name, found in values.items()})
        return cls(system, workload, users, tuple(rounds), median)

    @property
    def rate(self) -> Value:
        """Answers per second: the median, the least and the most of the rounds."""
        return _spread([one.requests_per_s for one in self.rounds])

    def against(self, rival: Row) -> Value:
        """Answers per second ÷ those of ``rival`` in the same round."""
        pairs = zip(self.rounds, rival.rounds, strict=False)
        return _spread([one.requests_per_s / other.requests_per_s for one, other in pairs])

    def as_json(self, rows: Sequence[Row]) -> dict[str, object]:
        """With the ratio to the rival's answers per second, if ``rows`` has its row."""
        rival = self.rival(rows)
        return {
            "system": self.system,
            "workload": self.workload,
            "users": self.users,
            **asdict(self.median),
            "rate": _named(self.rate),
            "rate_of_rival": None if rival is None else _named(self.against(rival)),
            "rounds": [asdict(one) for one in self.rounds],
        }

    def rival(self, rows: Sequence[Row]) -> Row | None:
        """The rival's row for the same load."""
        wanted = RIVAL, self.workload, self.users
        return next((one for one in rows if (one.system, one.workload, one.users) == wanted), None)


def _median(values: Sequence[float | None]) -> Any:
    """None if none is known."""
    known = [one for one in values if one is not None]
    return statistics.median(known) if known else None


def _spread(values: Sequence[float]) -> Value:
    return Value(statistics.median(values), min(values), max(values))


def _named(value: Value) -> dict[str, float]:
    return {"value": value.middle, "low": value.low, "high": value.high}


def _beyond_server_ms(answers: Sequence[Answer]) -> list[float]:
    return [
        1e3 * (answer.ttft_s - answer.server_ttft_s)
        for answer in answers
        if answer.ttft_s is not None and answer.server_ttft_s is not None
    ]


def goals(rows: Sequence[Row]) -> list[Goal]:
    """Whether we reached what we set out to, with as many users as there were at most."""
    most = max((row.users for row in rows), default=0)
    rag, chat = (
        {row.system: row.median for row in rows if (row.workload, row.users) == (workload, most)}
        for workload in ("rag", "chat")
    )
    return [
        _ttft(RAG_SOON, rag, RAG_TTFT),
        _rate(RAG_MANY, rag, [name for name in rag if name != OURS]),
        _ttft(CHAT_SOON, chat, 1.0),
        _rate(CHAT_MANY, chat, [RIVAL]),
    ]


def _ttft(text: str, systems: Mapping[str, Round], limit: float) -> Goal:
    if OURS not in systems or RIVAL not in systems:
        return Goal(text, None, "not measured")
    ours, theirs = systems[OURS].ttft_p50_ms, systems[RIVAL].ttft_p50_ms
    return Goal(text, ours <= limit * theirs, f"{ours:.0f} ms, {ours / theirs:.2f} of it")


def _rate(text: str, systems: Mapping[str, Round], others: Sequence[str]) -> Goal:
    if OURS not in systems or RIVAL not in systems:
        return Goal(text, None, "not measured")
    ours = systems[OURS].requests_per_s
    best = max(others, key=lambda name: systems[name].requests_per_s)
    theirs = systems[best].requests_per_s
    return Goal(text, ours >= theirs, f"{ours:.2f}, {best} {theirs:.2f}")
