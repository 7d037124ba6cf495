"""``python -m benchmarks NAME``: every benchmark there is. Works in the root folder of a clone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.entries import BENCHMARKS
from benchmarks.run_all import JOBS, run_all
from kvboost.cli.bench import PASS_ON, forward
from kvboost.cli.common import errors, out, unwrap_help

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


@app.command("all")
def everything(
    folder: Annotated[Path, typer.Option("--out", help="Results, logs and plots go here.")] = Path(
        "bench-results"
    ),
    only: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Run only these: {', '.join(job.name for job in JOBS)}. May be repeated."
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0.1, help="The most minutes; 89, or 3 with --quick.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Short forms: three minutes.")] = False,
) -> None:
    """Run the main benchmarks, unattended: at most 90 minutes, or three with --quick. Ends with
    status 1 if one failed."""
    with errors():
        report = run_all(folder, out, quick=quick, only=only or (), minutes=minutes)
    print(json.dumps(report))
    if any(one["state"] in ("failed", "timed out", "left out") for one in report["outcomes"]):
        raise typer.Exit(1)


unwrap_help(app)

if __name__ == "__main__":
    app(prog_name=PROGRAM)
