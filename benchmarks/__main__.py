"""``python -m benchmarks NAME``: every benchmark there is. Works in the root folder of a clone."""

from __future__ import annotations

import typer

from benchmarks.entries import BENCHMARKS
from kvboost.cli.bench import PASS_ON, forward
from kvboost.cli.common import unwrap_help

PROGRAM = "python -m benchmarks"
app = typer.Typer(
    help="Benchmarks for people who work on KVBoost, and those of kvboost bench.",
    no_args_is_help=True,
    add_completion=False,
)


for _benchmark in BENCHMARKS.values():
    app.command(_benchmark.name, help=_benchmark.question, context_settings=PASS_ON)(
        forward(_benchmark)
    )


unwrap_help(app)

if __name__ == "__main__":
    app(prog_name=PROGRAM)
