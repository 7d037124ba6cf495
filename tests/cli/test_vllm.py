"""``kvboost vllm``, with a server in its place; tests/inside_vllm has a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.integrations.vllm.client import Read, VllmServer

runner = CliRunner()
STATS = {
    "chunks": 12,
    "chunks_of_salt": 7,
    "tiers": {
        "ram": {"chunks": 12, "bytes": 3 << 20, "max_bytes": 2 << 30, "hits": 5, "faults": {}},
        "remote": {"bytes": 1024, "hits": 0, "faults": {}},
    },
    "prompt_tokens": {"exact": 1384, "approximate": 0, "moved": 866, "recomputed": 153},
    "loads": {"loaded": 2, "failed": 1},
    "load_seconds": 3.17,
}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What was asked of the server."""
    calls: list[tuple[str, Any]] = []

    def start(self: VllmServer, url: str, **options: Any) -> None:
        calls.append((url, options))

    def note(name: str, answer: Any) -> Any:
        def method(self: VllmServer, *given: Any) -> Any:
            calls.append((name, *given))
            return answer

        return method

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(VllmServer, "__init__", start)
    monkeypatch.setattr(VllmServer, "warm", note("warm", Read(1200, 64)))
    monkeypatch.setattr(VllmServer, "forget", note("forget", 3))
    monkeypatch.setattr(VllmServer, "forget_everything", note("forget everything", 4))
    monkeypatch.setattr(VllmServer, "stats", note("stats", STATS))
    return calls


def run(*arguments: str, code: int = 0, **more: Any) -> str:
    done = runner.invoke(app, ["vllm", *arguments], **more)
    assert done.exit_code == code, done.output
    return done.output


def test_warm_reads_every_file(calls: list[Any], tmp_path: Path) -> None:
    names = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for path in names:
        path.write_text(f"text of {path.stem}")
    assert run("warm", *map(str, names)).splitlines() == [
        f"{names[0]}: 1,200 tokens, 64 of them known before",
        f"{names[1]}: 1,200 tokens, 64 of them known before",
        "7 chunks are stored",
    ]
    assert calls[1:] == [("stats",), ("warm", "text of a"), ("warm", "text of b"), ("stats",)]
    printed = json.loads(run("warm", "-", "--json", input="from a pipe"))
    assert printed["documents"] == [{"file": "-", "tokens": 1200, "known_tokens": 64}]
    assert ("warm", "from a pipe") in calls


def test_where_and_for_whom(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    run("stats", "--url", "http://there:9", "--model", "m", "--salt", "mine")
    assert calls[0] == ("http://there:9", {"model": "m", "salt": "mine", "api_key": "secret"})


def test_a_file_that_cannot_be_read_stops_before_anything_is_asked(
    calls: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing", "binary"):
        assert "cannot be read" in run("warm", str(tmp_path / name), code=2)
    assert len(calls) == 2  # the server's address, twice


def test_forget_a_text_or_everything(calls: list[Any]) -> None:
    assert run("forget", "a secret") == "3 chunks forgotten\n"
    assert run("forget", "-", input="a piped secret") == "3 chunks forgotten\n"
    assert json.loads(run("forget", "--everything", "--json")) == {"forgotten": 4}
    assert [call for call in calls if call[0].startswith("forget")] == [
        ("forget", "a secret"),
        ("forget", "a piped secret"),
        ("forget everything",),
    ]
    for arguments in ([], ["a secret", "--everything"]):
        assert "or --everything" in run("forget", *arguments, code=2)


def test_stats_are_shown() -> None:
    lines = [line.split() for line in run("stats").splitlines()]
    assert lines[1] == ["ram", "12", "3MiB", "2GiB", "5"]
    assert lines[2] == ["remote", "1KiB", "0"]
    text = run("stats")
    assert "12 chunks, 7 of them under this salt" in text
    assert "1,384 exact, 0 approximate, 866 moved, 153 recomputed" in text
    assert "loads: 2 in 3.17 s; 1 failed" in text
    assert json.loads(run("stats", "--json")) == STATS
