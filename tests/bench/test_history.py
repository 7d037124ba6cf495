from __future__ import annotations

import json

import pytest
from rich.console import Console

from kvboost.bench import history, history_report
from kvboost.bench.history import NOISE, Figure, compare, entry_of, figures_of, verdict
from kvboost.errors import ConfigError

MACHINE = {"cpu": "a cpu", "cores": 2, "device": "cpu", "dtype": "bfloat16", "torch": "2.13"}


def sample(median: float, low: float, high: float) -> dict[str, float]:
    return {"median_ms": median, "min_ms": low, "max_ms": high}


def report(median: float, *, commit: str = "aaa", day: int = 1, **machine: object):
    return {
        "benchmark": "ttft",
        "date": f"2026-11-{day:02}T00:00:00+00:00",
        "commit": commit,
        "version": "1.0",
        "model": "small",
        "machine": {**MACHINE, **machine},
        "rows": [
            {"pattern": "code", "num_tokens": 512, "warm": sample(median, median - 1, median + 1)}
        ],
        "accuracy": {"value": 0.5, "low": 0.4, "high": 0.6},
        "speedup": 3.0,
    }


def test_only_figures_with_a_spread_are_kept_under_names_that_stay() -> None:
    figures = figures_of(report(100.0))
    assert figures == {
        "rows/code 512/warm": Figure(100.0, 99.0, 101.0, "ms"),
        "accuracy": Figure(0.5, 0.4, 0.6, ""),
    }


def test_rows_without_names_are_numbered() -> None:
    found = figures_of({"rows": [{"cost": sample(1, 1, 1)}, {"cost": sample(2, 2, 2)}]})
    assert list(found) == ["rows/#0/cost", "rows/#1/cost"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((100, 95, 105), (90, 85, 96), NOISE),
        ((100, 95, 105), (80, 70, 94), "faster by 1.25 ×"),
        ((80, 70, 94), (100, 95, 105), "slower by 1.25 ×"),
        ((100, 95, 105), (100, 10, 500), NOISE),
    ],
)
def test_a_difference_inside_the_spread_is_none(before, after, expected) -> None:
    assert verdict(Figure(*before, "ms"), Figure(*after, "ms")) == expected


def test_shares_are_higher_or_lower_rather_than_faster() -> None:
    assert verdict(Figure(0.5, 0.4, 0.6, ""), Figure(0.8, 0.7, 0.9, "")) == "higher by 0.3"
    assert verdict(Figure(0.5, 0.4, 0.6, ""), Figure(0.2, 0.1, 0.3, "")) == "lower by 0.3"


def entries(*reports):
    return [entry_of(one) for one in reports]


def test_the_newest_code_is_compared_with_the_one_before() -> None:
    (found,) = compare(
        entries(
            report(300.0, commit="old", day=1),
            report(200.0, commit="mid", day=2),
            report(100.0, commit="new", day=3),
        )
    )
    assert (found.before.commit, found.after.commit) == ("mid", "new")
    assert [change.verdict for change in found.changes] == ["faster by 2.00 ×", NOISE]
    (older,) = compare(
        entries(report(300.0, commit="old"), report(100.0, commit="new", day=3)), "ol"
    )
    assert older.changes[0].verdict == "faster by 3.00 ×"


def test_runs_of_the_same_code_widen_its_spread() -> None:
    runs = entries(
        report(100.0, commit="old", day=1),
        report(80.0, commit="old", day=2),
        report(90.0, commit="new", day=3),
    )
    assert compare(runs)[0].changes[0].verdict == NOISE
    assert compare([runs[0], runs[2]])[0].changes[0].verdict == "faster by 1.11 ×"


def with_control(median: float, stock: float, **options: object):
    made = report(median, **options)
    made["rows"][0]["stock"] = sample(stock, stock - 1, stock + 1)
    return made


def test_a_machine_in_another_mood_is_no_improvement() -> None:
    old = with_control(200.0, 1000.0, commit="old")
    (slow,) = compare(entries(old, with_control(300.0, 1500.0, commit="new", day=2)))
    verdicts = {change.figure: change.verdict for change in slow.changes}
    assert slow.drift == (1.5, 1.5)
    assert verdicts["rows/code 512/warm"] == verdicts["rows/code 512/stock"] == NOISE
    (fast,) = compare(entries(old, with_control(100.0, 980.0, commit="new", day=2)))
    verdicts = {change.figure: change.verdict for change in fast.changes}
    assert verdicts["rows/code 512/warm"] == "faster by 2.00 ×"
    # A machine twice as fast explains it all.
    (both,) = compare(entries(old, with_control(100.0, 500.0, commit="new", day=2)))
    assert {change.verdict for change in both.changes} == {NOISE}


def test_other_settings_are_another_question() -> None:
    few = {**report(100.0, commit="old"), "task": {"questions": 2}}
    many = {**report(10.0, commit="new", day=2), "task": {"questions": 200}}
    assert all(one.before is None for one in compare(entries(few, many)))


def test_machines_are_never_compared() -> None:
    found = compare(
        entries(
            report(100.0, commit="old", cpu="another"),
            report(50.0, commit="new", day=2),
            report(40.0, commit="new", day=3, dtype="float32"),
        )
    )
    assert len(found) == 3 and all(one.before is None and not one.changes for one in found)
    # Another version of torch on the same machine may well be what made the difference.
    (same,) = compare(
        entries(report(100.0, commit="old", torch="2.11"), report(50.0, commit="new", day=2))
    )
    assert same.before is not None


def test_a_report_without_machine_or_spread_is_refused() -> None:
    nameless = {**report(1.0), "machine": "as saved"}
    with pytest.raises(ConfigError, match="names no machine"):
        entry_of(nameless)
    assert entry_of(nameless, measured_here=True).machine["cores"] >= 1
    with pytest.raises(ConfigError, match="no figure with a spread"):
        entry_of({"benchmark": "x", "machine": {}, "speedup": 3})


def test_runs_survive_the_file_in_the_order_of_their_dates(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    for one in entries(report(2.0, day=2), report(1.0, day=1)):
        history.append(path, one)
    loaded = history.load(path)
    assert [entry.date[:10] for entry in loaded] == ["2026-11-01", "2026-11-02"]
    assert loaded[1] == entry_of(report(2.0, day=2))
    path.write_text(path.read_text() + '{"benchmark": "x"}\n')
    with pytest.raises(ConfigError, match="line 3, is no run"):
        history.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        history.load(tmp_path / "none.jsonl")


def test_a_report_is_the_last_line_or_the_whole_file(tmp_path) -> None:
    printed = tmp_path / "log.txt"
    printed.write_text("a table\n" + json.dumps(report(1.0)) + "\n")
    assert history.read_report(printed) == report(1.0)
    printed.write_text(json.dumps(report(1.0), indent=2))
    assert history.read_report(printed) == report(1.0)
    printed.write_text("nothing")
    with pytest.raises(ConfigError, match="no result of a benchmark"):
        history.read_report(printed)


def test_tables_and_picture_show_every_run(tmp_path, capsys) -> None:
    runs = entries(report(200.0, commit="old"), report(100.0, commit="new", day=2))
    console = Console(width=120)
    history_report.show_trend(history.trend(runs), console)
    history_report.show_comparison(compare(runs), console, everything=False)
    shown = capsys.readouterr().out
    assert "200 [199-201]" in shown and "faster by 2.00 ×" in shown
    assert "1 of 2 figures within the noise" in shown
    history_report.plot_trend(runs, tmp_path / "trend.png")
    assert (tmp_path / "trend.png").read_bytes().startswith(b"\x89PNG")
