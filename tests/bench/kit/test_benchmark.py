"""The shape that all benchmarks share: settings are checked, reports are shown and recorded."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from rich.console import Console

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import (
    Bench,
    Benchmark,
    ModelSettings,
    Report,
    Settings,
    duration,
    option,
    options_of,
    reading_speed,
)
from kvboost.bench.kit.figures import draw_bars
from kvboost.bench.kit.goals import Goal
from kvboost.errors import ConfigError
from support.tiny import make_engine, tiny_model


@dataclass(frozen=True, kw_only=True)
class Example(ModelSettings):
    QUICK: ClassVar = {"sizes": (1,)}

    sizes: tuple[int, ...] = option((2, 3), "Sizes.", "size", least=1)
    share: float = option(0.5, "A share.", least=0, most=1)
    kind: str = option("a", "A kind.", choices=("a", "b"))

    def tokens_read(self) -> float:
        return 1000.0 * sum(self.sizes)


def run(settings: Example, bench: Bench) -> Report:
    goals = [Goal("more", False, "2")]
    return Report(
        {"sum": sum(settings.sizes)},
        ["a table"],
        goals,
        draw=lambda title: draw_bars({"": {"s": {"g": 1.0}}}, title=title, y=["y"]),
        problems=["it leaks", "it leaks"],
    )


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Benchmark:
    module = ModuleType("an_example")
    module.Settings, module.run = Example, run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "an_example", module)
    return Benchmark("example", "Does it work?", "an_example")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": (1, 0)}, "size=0 must be a whole number of at least 1"),
        ({"share": 1.5}, r"share=1\.5 must be a number between 0 and 1"),
        ({"kind": "c"}, "kind='c' is not available; choose one of 'a', 'b'"),
    ],
)
def test_settings_are_checked_when_they_are_made(given, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Example(**given)


def test_the_quick_form_changes_what_is_not_given(example: Benchmark) -> None:
    assert example.settings(quick=True) == Example(sizes=(1,))
    assert example.settings(quick=True, sizes=(7,), kind="b") == Example(sizes=(7,), kind="b")


def test_a_run_is_shown_drawn_and_recorded(example: Benchmark, tmp_path: Path, capsys) -> None:
    plot, output = tmp_path / "a.svg", tmp_path / "a.json"
    settings = Example()
    made = example.perform(settings, Console(), plot=plot, output=output)
    assert made["benchmark"] == "example" and made["sum"] == 5
    assert made["settings"] == {"sizes": (2, 3), "share": 0.5, "kind": "a"}
    assert made["problems"] and made["goals"][0]["met"] is False
    shown = capsys.readouterr().out
    assert "a table" in shown and "goal, more: not met (2)" in shown
    assert shown.count("! it leaks") == 1  # the same problem is shown once
    assert plot.read_bytes().startswith(b"<?xml")
    same = json.loads(json.dumps(made))
    assert json.loads(output.read_text()) == same


def test_a_place_that_cannot_be_written_is_found_before_the_run(example: Benchmark) -> None:
    nowhere = "there is no folder '/nowhere'"
    for name, path, said in (
        ("plot", "a.doc", r"plot='a\.doc' must end in \.png or \.svg"),
        ("plot", "/nowhere/a.png", nowhere),
        ("output", "/nowhere/a", nowhere),
    ):
        with pytest.raises(ConfigError, match=said):
            example.perform(Example(), Console(quiet=True), **{name: Path(path)})


def test_the_user_is_told_how_long_it_takes(capsys) -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine:
        assert reading_speed(engine) > 0
        Bench(Console(width=200), Example())._estimate(engine)
        told = capsys.readouterr().out
        assert told.startswith("about ") and "--quick takes about" in told
        Bench(Console(width=200), Example(sizes=(1,)))._estimate(engine)  # it is the quick form
        assert "--quick" not in capsys.readouterr().out
    assert [duration(s) for s in (0.1, 80, 300, 7200)] == [
        *("1 seconds", "80 seconds", "5 minutes", "2.0 hours")
    ]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_of_the_list_loads(name: str) -> None:
    benchmark = BENCHMARKS[name]
    assert benchmark.question.endswith("?") and len(benchmark.question) <= 100
    kind = benchmark.load().Settings
    assert issubclass(kind, Settings) and callable(benchmark.load().run)
    assert set(kind.QUICK) <= {one.name for one in fields(kind)}
    settings = benchmark.settings()
    assert benchmark.settings(quick=True).tokens_read() <= settings.tokens_read()
    assert all(told.help.endswith(".") for _, told in options_of(kind).values())


def test_the_docs_name_every_benchmark() -> None:
    text = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    for name in BENCHMARKS:
        assert f"`bench {name}`" in text or f"`{name}`" in text, name
