"""Recorded sessions of agents: a file of JSON lines, a request each."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import TypeVar

from kvboost.bench.texts.questions import field_of, parse_json
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
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            kind, name, turn, request = _parse(number, line)
            key = (kind, name)
            if turn is not None and turn <= turns.get(key, turn - 1):
                raise ValueError(f"turn {turn} of session {name!r} follows turn {turns[key]}")
        except ValueError as error:
            raise ConfigError(
                f"{os.fspath(path)}, line {number}: {error}; expected {EXPECTED}"
            ) from error
        if turn is not None:
            turns[key] = turn
        sessions.setdefault(key, Session(kind, name)).requests.append(request)
    if not sessions:
        raise ConfigError(
            f"{os.fspath(path)}, line 1: the file holds no requests; "
            f"expected one a line: {EXPECTED}"
        )
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


def _lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    name = Path(path).expanduser()
    number = 0
    try:
        with gzip.open(name) if name.suffix == ".gz" else name.open("rb") as file:
            for line in file:
                number += 1
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be unpacked after line {number} ({error}); "
            "give a whole file that gzip made, or one that does not end in .gz"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be read ({error.strerror}); "
            f"give a file with one request a line: {EXPECTED}"
        ) from error


def _parse(number: int, line: bytes) -> tuple[str, str, int | None, Request]:
    """Kind, session, turn and request. Raises ``ValueError`` that says what is wrong."""
    row = parse_json(line)
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
