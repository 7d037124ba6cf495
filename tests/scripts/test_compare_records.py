from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from kvboost.bench.kit.record import append
from kvboost.errors import ConfigError
from support.load_script import load_script

history = load_script("compare_records")
NOISE, Figure = history.NOISE, history.Figure
compare, figures_of, verdict = history.compare, history.figures_of, history.verdict

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


def verdicts(found) -> list[str]:
    return [told for *_, told in found.changes.values()]


def test_the_newest_code_is_compared_with_the_one_before() -> None:
    (found,) = compare(
        records(
            report(300.0, commit="old", day=1),
            report(200.0, commit="mid", day=2),
            report(100.0, commit="new", day=3),
        )
    )
    assert (found.before, found.after) == ("mid", "new")
    assert verdicts(found) == ["faster by 2.00 ×", NOISE]
    (older,) = compare(
        records(report(300.0, commit="old"), report(100.0, commit="new", day=3)), "ol"
    )
    assert verdicts(older)[0] == "faster by 3.00 ×"


def test_runs_of_the_same_code_widen_its_spread() -> None:
    runs = records(
        report(100.0, commit="old", day=1),
        report(80.0, commit="old", day=2),
        report(90.0, commit="new", day=3),
    )
    assert verdicts(compare(runs)[0])[0] == NOISE
    assert verdicts(compare([runs[0], runs[2]])[0])[0] == "faster by 1.11 ×"


def records(*made):
    return list(made)


def with_control(median: float, stock: float, **options: object):
    made = report(median, **options)
    made["rows"][0]["stock"] = sample(stock, stock - 1, stock + 1)
    return made


def test_a_machine_that_is_faster_today_is_no_improvement() -> None:
    old = with_control(200.0, 1000.0, commit="old")
    (slow,) = compare(records(old, with_control(300.0, 1500.0, commit="new", day=2)))
    told = {name: change[2] for name, change in slow.changes.items()}
    assert slow.drift == (1.5, 1.5)
    assert told["rows/code 512/warm"] == told["rows/code 512/stock"] == NOISE
    (fast,) = compare(records(old, with_control(100.0, 980.0, commit="new", day=2)))
    told = {name: change[2] for name, change in fast.changes.items()}
    assert told["rows/code 512/warm"] == "faster by 2.00 ×"
    # A machine twice as fast explains it all.
    (both,) = compare(records(old, with_control(100.0, 500.0, commit="new", day=2)))
    assert set(verdicts(both)) == {NOISE}


def test_other_settings_are_another_question() -> None:
    few = {**report(100.0, commit="old"), "settings": {"questions": 2}}
    many = {**report(10.0, commit="new", day=2), "settings": {"questions": 200}}
    assert all(one.before is None for one in compare(records(few, many)))


def test_machines_are_never_compared() -> None:
    found = compare(
        records(
            report(100.0, commit="old", cpu="another"),
            report(50.0, commit="new", day=2),
            report(40.0, commit="new", day=3, dtype="float32"),
        )
    )
    assert len(found) == 3 and all(one.before is None and not one.changes for one in found)
    # Another version of torch on the same machine may well be what made the difference.
    (same,) = compare(
        records(report(100.0, commit="old", torch="2.11"), report(50.0, commit="new", day=2))
    )
    assert same.before is not None


def test_records_are_read_in_the_order_of_their_dates(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    for one in (report(2.0, day=2), report(1.0, day=1)):
        append(path, one)
    loaded = history.load(path)
    assert [record["date"][:10] for record in loaded] == ["2026-11-01", "2026-11-02"]
    assert loaded[1] == report(2.0, day=2)
    path.write_text(path.read_text() + '{"benchmark": "x"}\n')
    with pytest.raises(ConfigError, match=r"line 3, is no record"):
        history.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        history.load(tmp_path / "none.jsonl")


def test_the_script_shows_what_changed_and_ends_with_json(tmp_path) -> None:
    path = tmp_path / "history.jsonl"
    for one in (report(200.0, commit="old"), report(100.0, commit="new", day=2)):
        append(path, one)
    app = typer.Typer()
    app.command()(history.main)
    done = CliRunner().invoke(app, [str(path)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "200 [199-201]" in done.stdout and "1 of 2 figures within the noise" in done.stdout
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["verdicts"]["rows/code 512/warm"] == "faster by 2.00 ×"
    assert CliRunner().invoke(app, ["nowhere.jsonl"]).exit_code == 2
