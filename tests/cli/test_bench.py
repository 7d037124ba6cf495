"""``kvboost bench``: a command for every benchmark of the list."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.cli import app

runner = CliRunner()


def run(*arguments: str):
    return runner.invoke(app, ["bench", *arguments])


def test_every_benchmark_of_the_list_is_a_command_with_the_options_it_is_given() -> None:
    shown = run("--help").output
    for name in BENCHMARKS:
        assert name in shown
        told = run(name, "--help").output
        for option in ("--quick", "--plot", "--output"):
            assert option in told, (name, option)


def test_listing_benchmarks_loads_none_of_them() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from kvboost.cli import app\n"
        "assert CliRunner().invoke(app, ['bench', '--help']).exit_code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_explains_an_option_with_its_choices_and_default() -> None:
    told = " ".join(run("serve", "--help").output.replace("│", " ").split())
    assert "What users send. One of rag, rag-8k, chat, agent. May be repeated." in told
    assert "[default: rag, chat]" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("quality", "--donor", "magic"), "donor='magic'"),
        (("quality", "--bits", "3"), "bits=3 is not available"),
        (("quality", "--passage-tokens", "4"), "passage-tokens=4 must be"),
        (("quality", "--save", "/nowhere/rows"), "there is no folder '/nowhere'"),
        (("ttft", "--plot", "a.doc"), "must end in"),
    ],
)
def test_mistakes_are_one_line_and_found_before_a_model_is_loaded(arguments, message) -> None:
    done = run(*arguments, "-m", "no-such-model")
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", "")
    assert "Traceback" not in done.output


def test_an_unknown_option_is_a_usage_error() -> None:
    done = run("ttft", "--colour", "red")
    assert done.exit_code == 2 and "--colour" in done.output
