"""``kvboost bench``: a command for every benchmark of the package, made from its settings.

A benchmark is imported when its command runs: ``kvboost bench --help`` needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import typer
from typer.main import get_command

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.kit.benchmark import Benchmark, Option, options_of
from kvboost.cli.common import errors, out, set_signature
from kvboost.config import bound_kernel_caches, install_extra
from kvboost.errors import ConfigError

app = typer.Typer(help="Benchmarks: measure it yourself.", no_args_is_help=True)

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command that hands its arguments to another."""
Plot = Annotated[Path | None, typer.Option(help="Draw a picture: a .png or .svg file.")]
Output = Annotated[Path | None, typer.Option(help="Also write the JSON record to this file.")]
Quick = Annotated[bool, typer.Option("--quick", help="A short form; other options still count.")]


def forward(benchmark: Benchmark) -> Callable[[typer.Context], None]:
    """A command that hands all of its arguments to that of ``benchmark``."""

    def command(context: typer.Context) -> None:
        made = command_of(benchmark)
        status = made.main(context.args, context.command_path, standalone_mode=False)
        if status:
            raise typer.Exit(status)

    return command


for _benchmark in BENCHMARKS.values():
    app.command(_benchmark.name, help=_benchmark.question, context_settings=PASS_ON)(
        forward(_benchmark)
    )


def command_of(benchmark: Benchmark) -> Any:
    """The command of a benchmark, with an option for each of its settings."""
    if benchmark.long_running:
        bound_kernel_caches()
    with errors(), _extra(benchmark.name):
        module = benchmark.load()
    options = options_of(module.Settings)
    defaults = {one.name: one.default for one in fields(module.Settings)}

    def run(**given: Any) -> None:
        kit = {name: given.pop(name) for name in ("plot", "output")}
        quick = given.pop("quick")
        chosen = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
            if value not in (None, [], ())
        }
        with errors(), _extra(benchmark.name):
            settings = benchmark.settings(quick=quick, **chosen)
            record = benchmark.perform(settings, out, **kit)
        print(json.dumps(record))
        if record.get("problems"):
            raise typer.Exit(1)

    shared = {"quick": (Quick, False), "plot": (Plot, None), "output": (Output, None)}
    own = (
        (name, None, _annotation(name, kind, option, defaults[name]))
        for name, (kind, option) in options.items()
    )
    set_signature(run, [*own, *((name, usual, kind) for name, (kind, usual) in shared.items())])
    told = f"{benchmark.question}\n\nPrints tables, and its record as JSON on the last line."
    if benchmark.goals:
        told += "\n\nGoals: " + "; ".join(benchmark.goals) + "."
    made = typer.Typer(add_completion=False)
    made.command(benchmark.name, help=told)(run)
    return get_command(made)


def _annotation(name: str, kind: Any, option: Option, default: Any) -> Any:
    """A setting as an option of a command; not given is None."""
    flags = [f"--{(option.flag or name).replace('_', '-')}"]
    if name == "model":
        flags.append("-m")
    told = option.help
    if option.choices:
        told += f" One of {', '.join(map(str, option.choices))}."
    usual = ", ".join(map(str, default)) if isinstance(default, tuple) else default
    if get_origin(kind) is tuple:
        told += " May be repeated."
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    elif isinstance(kind, UnionType):
        (kind,) = (one for one in get_args(kind) if one is not type(None))
    if kind is bool:
        return Annotated[bool, typer.Option(*flags, help=told, show_default=False)]
    if usual not in (None, "", False):
        told += rf" \[default: {usual}]"
    return Annotated[kind | None, typer.Option(*flags, help=told, show_default=False)]


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Says what to install if a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        said = f"the benchmark {name} needs {error.name}; {install_extra('bench')}"
        raise ConfigError(said) from error
