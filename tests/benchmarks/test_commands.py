"""``python -m benchmarks``: every benchmark is a command, and every module is used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

import benchmarks
from benchmarks.__main__ import app
from benchmarks.entries import BENCHMARKS
from kvboost.errors import KVBoostError
from support.page_code import ROOT, complaint

FOLDER = Path(benchmarks.__file__).parent
SHARED = {"__main__", "entries", "shapes", "random_int4"}
WORKERS = {"vllm_connector", "vllm_runs"}

runner = CliRunner()


def run(*arguments: str):
    return runner.invoke(app, list(arguments))


def test_every_module_is_a_benchmark_or_used_by_one() -> None:
    named = {one.module.split(".")[1] for one in BENCHMARKS.values() if "kvboost" not in one.module}
    modules = {path.stem for path in FOLDER.glob("*.py")} | {"faults", "larger"}
    assert modules == named | SHARED | WORKERS | {"__init__"}


def test_the_list_has_every_benchmark() -> None:
    shown = run("--help").output
    for name in BENCHMARKS:
        assert name in shown


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_of_the_kit_has_the_options_it_is_given(name: str) -> None:
    told = run(name, "--help").output
    for option in ("--quick", "--plot", "--output"):
        assert option in told, option


def test_make_bench_gives_options_that_there_are() -> None:
    jobs = re.findall(r"call MEASURE,\d+,(\w+),(.*)\)", (ROOT / "Makefile").read_text())
    assert len(jobs) == 4
    for name, options in jobs:
        assert complaint(("kvboost", "bench", name, *options.split())) is None


@pytest.mark.parametrize(
    ("name", "given"), [("gpu", {"shapes": ("7b",)}), ("larger", {}), ("far", {})]
)
def test_a_benchmark_of_gpus_says_that_it_needs_one(name: str, given, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(KVBoostError, match=r"needs an NVIDIA GPU|--shape tiny"):
        BENCHMARKS[name].perform(BENCHMARKS[name].settings(**given), Console(quiet=True))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("soak", "--minutes", "0"), "minutes=0"),
        (("arena", "--data", "d"), "out is missing"),
    ],
)
def test_mistakes_are_one_line(arguments, message: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", "") and "Traceback" not in done.output
