"""A tiny trace, replayed against real servers of a tiny model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kvboost.bench.agent import replay
from kvboost.bench.agent.checks import Check
from kvboost.bench.agent.replay_report import Replayed, path_problems
from kvboost.bench.agent.settings import Settings
from kvboost.bench.agent.traced import Prompt, Traced
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Option
from kvboost.bench.peers.process import Running
from kvboost.bench.peers.servers import BASELINE, CONNECTOR, OURS, PREFIX, SYSTEMS
from kvboost.bench.serve.clients import SOURCES, Answer
from kvboost.errors import ConfigError
from support.fake_openai import FakePeer
from support.live_server import live_server
from support.passages import text
from support.tiny import byte_tokenizer, make_engine, tiny_config, tiny_model

CONTEXT = 4096
HEAD, LONG = "You are a coding agent.\n", text("file", 60)
EDITED = [f"{HEAD}The time is {clock}.\n{LONG}\n" for clock in ("9:59", "10:00 sharp")]
CLEARED = [f"{HEAD}{text('result', 20)}\n{LONG}\n", f"{HEAD}[cleared]\n{LONG}\nWhat now?"]


ANSWER = text("answer", 30)
QUOTED = f"Review this.\n{ANSWER}\nIs that so?"


def write(path: Path, sessions: dict[tuple[str, str], list[str]]) -> str:
    lines = [
        json.dumps({"agent": kind, "session": name, "turn": turn, "input": one, "output": ANSWER})
        for (kind, name), prompts in sessions.items()
        for turn, one in enumerate(prompts)
    ]
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Of the servers' own tokenizer, for the bench."""
    tiny_config("llama", max_position_embeddings=CONTEXT).save_pretrained(tmp_path / "tiny")
    byte_tokenizer().save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    sessions = {
        ("edits", "a"): [*EDITED, EDITED[1], ""],
        ("clears", "b"): [*CLEARED, QUOTED, "x" * CONTEXT],
        ("edits", "c"): [EDITED[0], EDITED[0] + "It goes on."],
    }
    return write(tmp_path / "trace.jsonl", sessions)


def perform(tmp_path: Path, **options: Any) -> tuple[dict[str, Any], str]:
    shown = StringIO()
    settings = Settings(threads=1, **options)
    report = BENCHMARKS["agent"].perform(
        settings, Console(file=shown, width=150), plot=tmp_path / "a.svg"
    )
    return report, shown.getvalue()


class Here(Running):
    """A server in this process, which cannot be frozen alone."""

    def freeze(self) -> None:
        pass

    thaw = freeze


@contextmanager
def in_this_process(peer: Any, *_: object, **__: object) -> Iterator[Here]:
    model = tiny_model("llama", max_position_embeddings=CONTEXT)
    mode = "chunk_kv_reuse" if peer.name == OURS else "prefix_cache"
    with make_engine(model) as engine, live_server(engine, mode=mode) as server:
        yield Here(server.url, engine.model_name, os.getpid(), 0.0)


def test_real_servers_read_the_recorded_prompts(
    tmp_path: Path, model: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "running", in_this_process)
    report, shown = perform(
        tmp_path,
        model=model,
        trace=trace,
        systems=(OURS, PREFIX),
        at_once=2,
        checked=2,
        reuse_moved="always",
    )
    assert not report["failures"] and "problems" not in report, shown
    assert list(report["kinds"]) == ["edits", "clears", "all"]
    sent = report["kinds"]["all"]
    assert (sent["sessions"], sent["requests"], sent["too_long"], sent["empty"]) == (3, 8, 1, 1)
    rows = {(row["system"], row["kind"]): row for row in report["rows"]}
    ours, prefix = (rows[name, "all"] for name in (OURS, PREFIX))
    for row in (ours, prefix):
        assert row["prompt_tokens"] == sent["prompt_tokens"] == sum(row["rows"].values())
        assert row["ideal_tokens"] == sent["ideal_tokens"]
        assert sum(row["shares"].values()) == pytest.approx(1.0)
    assert prefix["rows"]["moved"] == prefix["rows"]["approximate"] == 0
    assert prefix["computed_tokens"] == sent["ideal_tokens"]
    assert ours["rows"]["moved"] > 0
    assert ours["computed_by_ideal"] < prefix["computed_by_ideal"]
    assert prefix["ours_by_this"] == pytest.approx(ours["ttft_ms"] / prefix["ttft_ms"])
    (quoted,) = (one for one in report["requests"] if one["tokens"] == len(QUOTED))
    assert quoted["elsewhere_tokens"] > 0.8 * len(ANSWER), "the answers were read"
    assert quoted["answers"][OURS]["rows"]["moved"] > 0.8 * len(ANSWER)
    assert len(report["checks"]) == 2 and all(one["moved_tokens"] for one in report["checks"])
    assert "1 requests were left out: they have more than" in shown
    assert (tmp_path / "a.svg").stat().st_size and json.dumps(report)


def test_sessions_end_in_time_and_failures_are_told(
    tmp_path: Path, model: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SYSTEMS, "fake", FakePeer())
    monkeypatch.setitem(SYSTEMS, "broken", FakePeer("raise SystemExit(7)"))
    monkeypatch.setattr(Option, "check", lambda *_: None)  # these are not of the list
    report, shown = perform(
        tmp_path,
        model=model,
        trace=trace,
        systems=("broken", "fake"),
        kinds=("edits",),
        minutes=0.0,
    )
    assert [row["system"] for row in report["rows"]] == ["fake"]
    assert any("fake counts" in one for one in report["problems"])
    assert "broken was given up: fake ended with 7" in shown
    assert report["kinds"]["edits"]["sessions"] == 1 and report["sessions_too_late"] == 1
    assert "1 of 2 sessions were left out: no time (--minutes)" in shown


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"sessions": 2}, "--sessions needs a replay"),
        ({"kinds": ("a",)}, "--kind needs a replay"),
        ({"trace": "x", "layouts": ("files",)}, "--layout has no use in a replay"),
        ({"trace": "x", "at_once": 0}, "at_once=0"),
    ],
)
def test_options_of_the_other_form_are_refused(options: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        Settings(**options)
    assert BENCHMARKS["agent"].settings(quick=True, trace="x")


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"most_tokens": 5000}, "most_tokens=5000 must be at most 4095"),
        ({"most_tokens": 3}, "no request has between 1 and 3 tokens"),
        ({"checked": 1, "systems": (PREFIX,)}, "checked=1 compares answers of kvboost"),
        ({"kinds": ("z",)}, "kind='z': the trace has edits, clears"),
    ],
)
def test_a_replay_that_cannot_be_done_says_why(
    tmp_path: Path, model: str, trace: str, options: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError, match=wrong):
        perform(tmp_path, model=model, trace=trace, **{"systems": (OURS,), **options})


def replayed(
    elsewhere: int = 64, checks: tuple[Check, ...] = (), **rows: dict[str, int]
) -> Replayed:
    """One request of 100 tokens; rows by system."""
    prompt = Prompt(1, "x", 100, 10, elsewhere)
    answers = {
        system.replace("_", "-"): {
            1: Answer(0, ttft_s=1.0, prompt_tokens=100, rows=dict.fromkeys(SOURCES, 0) | own)
        }
        for system, own in rows.items()
    }
    return Replayed([Traced("coder", "one", (prompt,), 0, 0)], answers, checks, {})


def test_a_path_that_did_not_run_is_a_problem() -> None:
    moved, exact = {"exact": 10, "moved": 90, "recomputed": 9}, {"exact": 10, "computed": 90}
    assert not path_problems(replayed(kvboost=moved, kvboost_prefix=exact))
    assert not path_problems(replayed(elsewhere=0, kvboost=exact))
    (nothing,) = path_problems(replayed(kvboost=exact))
    assert "kvboost moved nothing, though 64 tokens were known elsewhere" in nothing
    (too_much,) = path_problems(replayed(kvboost_prefix=moved))
    assert f"{PREFIX} moved 81 rows" in too_much
    (reused,) = path_problems(replayed(kvboost_baseline=exact))
    assert reused == f"{BASELINE} reused 10 of 100 tokens"
    inside = Replayed(replayed().sessions, {CONNECTOR: {1: Answer(0, prompt_tokens=100)}}, (), {})
    assert [CONNECTOR in one for one in path_problems(inside)] == [True]
    other = Replayed(replayed().sessions, {"vllm": {1: Answer(0, prompt_tokens=99)}}, (), {})
    assert ["vllm counts 99 prompt tokens" in one for one in path_problems(other)] == [True]


def test_a_check_that_compared_nothing_is_a_problem() -> None:
    check = Check("coder", 7, 0, 3, 0.0, same_action=True, same_text=True)
    first, second = path_problems(replayed(elsewhere=0, checks=(check,)))
    assert "no checked turn reused moved text" in first
    assert second == "line 7: the full prefill reused 3 rows"


def test_rows_computed_by_kvboost_inside_vllm_are_counted() -> None:
    answers = {CONNECTOR: {1: Answer(0, prompt_tokens=100, cached_tokens=80)}}
    inside = {"moved": 60.0, "recomputed": 6.0, "computed": 4.0}
    found = Replayed(replayed().sessions, answers, (), inside, 10)
    assert [row.computed_tokens for row in found.rows("coder")] == [30]
    at_once = Replayed(replayed().sessions, answers, (), inside)
    assert [row.computed_tokens for row in at_once.rows("coder")] == [None]
