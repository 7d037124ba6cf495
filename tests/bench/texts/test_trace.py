from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvboost.bench.texts.trace import choose_sessions, read_trace
from kvboost.errors import ConfigError


def row(session: str, text: str, kind: str = "coder", **more: Any) -> str:
    return json.dumps({"agent": kind, "session": session, "input": text, **more})


def write(path: Path, *lines: str) -> Path:
    data = "\n".join(lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_requests_of_a_session_stay_in_order_though_sessions_mix(tmp_path: Path, name: str) -> None:
    lines = (row("a", "one", turn=0), row("b", "x"), "", row("a", "two", turn=3, output="said"))
    lines += (row("a", "of another kind", "clerk"),)
    first, second, _ = read_trace(write(tmp_path / name, *lines))
    assert [(one.line, one.text) for one in first.requests] == [(1, "one"), (4, "two")]
    assert [one.text for one in second.requests] == ["x"]


def test_sessions_are_spread_over_the_kinds(tmp_path: Path) -> None:
    lines = [
        row(name, "x", kind) for kind, names in {"p": "abc", "q": "d"}.items() for name in names
    ]
    sessions = read_trace(write(tmp_path / "t", *lines))
    assert [one.name for one in choose_sessions(sessions)] == ["a", "d", "b", "c"]
    assert [one.name for one in choose_sessions(sessions, ("p",))] == ["a", "b", "c"]
    with pytest.raises(ConfigError, match=r"kind='z': the trace has p, q"):
        choose_sessions(sessions, ("z",))


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (json.dumps({"session": "a", "input": "x"}), "'agent' is missing"),
        (row("", "x"), "'session' is empty"),
        (json.dumps({"agent": "a", "session": "b", "input": ["x"]}), "'input' is .*not a text"),
        (row("a", "x", turn="2"), "'turn' is '2', not a whole number"),
        (row("a", "x", turn=4), "turn 4 of session 'a' follows turn 4"),
    ],
)
def test_an_error_names_the_file_the_line_and_what_is_wrong(
    tmp_path: Path, line: str, wrong: str
) -> None:
    path = write(tmp_path / "trace.jsonl", row("a", "x", turn=4), line)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*{wrong}.*expected"):
        read_trace(path)


def test_a_file_that_cannot_be_unpacked_is_named(tmp_path: Path) -> None:
    whole = write(tmp_path / "t.gz", *(row("a", f"{number}") for number in range(2000)))
    whole.write_bytes(whole.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"t\.gz cannot be unpacked after line \d+"):
        read_trace(whole)
    (tmp_path / "plain.gz").write_text(row("a", "x"))
    with pytest.raises(ConfigError, match=r"plain\.gz cannot be unpacked after line 0"):
        read_trace(tmp_path / "plain.gz")
