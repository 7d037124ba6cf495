"""Recorded sessions of agents: a file of JSON lines, a request each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, TypeVar

from kvboost.bench.texts.json_lines import field_of, read_rows
from kvboost.errors import ConfigError

T = TypeVar("T")
EXPECTED = (
    '{"agent": KIND, "session": NAME, "input": THE WHOLE PROMPT}, and perhaps "turn": NUMBER and '
    '"output": THE ANSWER'
)


@dataclass(frozen=True)
class Request:
    line: int
    """Where the file has it, from 1."""
    text: str
    """The whole prompt; empty if none was recorded."""
    answer: str = ""
    """The model's answer then, if it was recorded."""


@dataclass(frozen=True)
class Session:
    kind: str
    name: str
    requests: list[Request] = field(default_factory=list)


def read_trace(path: str | os.PathLike[str]) -> list[Session]:
    """The sessions of a file, in the order in which they begin. A name that ends in ``.gz`` is
    unpacked."""
    sessions: dict[tuple[str, str], Session] = {}
    turns: dict[tuple[str, str], int] = {}

    def parse(number: int, row: Any) -> None:
        kind, name, turn, request = _parse(number, row)
        key = (kind, name)
        if turn is not None:
            if turn <= turns.get(key, turn - 1):
                raise ValueError(f"turn {turn} of session {name!r} follows turn {turns[key]}")
            turns[key] = turn
        sessions.setdefault(key, Session(kind, name)).requests.append(request)

    read_rows(path, parse, "request", EXPECTED)
    return list(sessions.values())


def choose_sessions(sessions: Sequence[Session], kinds: Sequence[str] = ()) -> list[Session]:
    """Those of ``kinds``, or all: the first of each kind, then the second of each, and so on."""
    by_kind: dict[str, list[Session]] = {}
    for session in sessions:
        by_kind.setdefault(session.kind, []).append(session)
    for kind in kinds:
        if kind not in by_kind:
            raise ConfigError(f"kind={kind!r}: the trace has {', '.join(by_kind)}; choose of these")
    wanted = [own for kind, own in by_kind.items() if not kinds or kind in kinds]
    return spread(wanted)


def spread(groups: Sequence[Sequence[T]]) -> list[T]:
    """The first of each group, then the second of each, and so on."""
    return [one for one in chain(*zip_longest(*groups)) if one is not None]


def _parse(number: int, row: Any) -> tuple[str, str, int | None, Request]:
    """Kind, session, turn and request. Raises ``ValueError`` that says what is wrong."""
    kind, name, text = (_text(row, one) for one in ("agent", "session", "input"))
    for what, value in (("agent", kind), ("session", name)):
        if not value:
            raise ValueError(f"{what!r} is empty")
    turn = row.get("turn")
    if turn is not None and (not isinstance(turn, int) or isinstance(turn, bool)):
        raise ValueError(f"'turn' is {turn!r:.80}, not a whole number")
    answer = "" if row.get("output") is None else _text(row, "output")
    return kind, name, turn, Request(number, text, answer)


def _text(row: object, name: str) -> str:
    value = field_of(row, name)
    if not isinstance(value, str):
        raise ValueError(f"{name!r} is {value!r:.80}, not a text")
    return value
