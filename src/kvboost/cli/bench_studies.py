"""``kvboost bench``, continued: studies of one request, of settings, memory and growth; what has
changed since the last run; and all benchmarks together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvboost.cli.common import Dataset, Device, Dtype, Model, errors, out
from kvboost.config import DEFAULT_MODEL

Plot = Annotated[Path | None, typer.Option(help="Draw it: a .png or .svg file.")]
Rounds = Annotated[int | None, typer.Option(min=1, max=50, help="Medians are over this many.")]
History = Annotated[
    Path | None, typer.Option(help="Add the result to this file, for kvboost bench history.")
]
Sizes = list[int] | None

history_app = typer.Typer(
    help="Results over time, and whether something has really changed.", no_args_is_help=True
)


def breakdown(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[
        Sizes, typer.Option(help="Prompt lengths; 512, 1024, 2048 and 4096 if not given.")
    ] = None,
    rounds: Rounds = None,
    quick: Annotated[bool, typer.Option(help="Two short lengths, two rounds.")] = False,
    plot: Plot = None,
    history: History = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Where the time of one request goes, phase by phase: without reuse, after an exact hit, with
    moved text; JSON on the last line."""
    with errors():
        from kvboost.bench.breakdown import run_breakdown

        lengths = tokens or ([512, 1024] if quick else [512, 1024, 2048, 4096])
        report = run_breakdown(
            model,
            lengths,
            rounds or (2 if quick else 7),
            out,
            plot=_text(plot),
            device=device,
            dtype=dtype,
        )
        _finish(report, history)


def sweep(
    dataset: Dataset = None,
    model: Model = DEFAULT_MODEL,
    chunking: Annotated[
        list[str] | None, typer.Option(help="fixed, semantic, document; all if not given.")
    ] = None,
    chunk_size: Annotated[
        Sizes, typer.Option(help="Tokens of a chunk; 64, 128 and 256 if not given.")
    ] = None,
    bits: Annotated[Sizes, typer.Option(help="16, 8, 4; 16 and 4 if not given.")] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="auto, cacheblend and none if not given.")
    ] = None,
    ratio: Annotated[
        list[float] | None, typer.Option(help="Share recomputed; 0.15 and 0.3 if not given.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions; 4 if not given.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Passages in a prompt.")] = 8,
    passage_tokens: Annotated[int, typer.Option(min=64, help="The most tokens of one.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 16,
    quick: Annotated[bool, typer.Option(help="Few settings, one short question.")] = False,
    plot: Plot = None,
    history: History = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Chunk size × strategy × ratio × bits: time to first token, hit rate, bytes and deviation of
    every combination, the best ones marked; JSON on the last line."""
    with errors():
        from kvboost.bench.quality import Setting
        from kvboost.bench.sweep import Grid, run_sweep

        usual = Grid(("fixed",), (64, 128), (16, 4), ("auto", "none"), (0.15,)) if quick else Grid()
        grid = Grid(
            chunking or usual.chunkings,
            chunk_size or usual.chunk_sizes,
            bits or usual.bits,
            strategy or usual.strategies,
            ratio or usual.ratios,
        )
        setting = Setting(passages, passage_tokens, answer_tokens)
        report = run_sweep(
            model,
            grid,
            Setting(3, 128, 6) if quick else setting,
            limit or (1 if quick else 4),
            out,
            datasets=[str(path) for path in dataset or ()],
            plot=_text(plot),
            device=device,
            dtype=dtype,
        )
        _finish(report, history)


def memory(
    model: Model = DEFAULT_MODEL,
    bits: Annotated[Sizes, typer.Option(help="16, 8, 4; all if not given.")] = None,
    tokens: Annotated[
        Sizes, typer.Option(help="Of the document; 2048 and 6144 if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="One setting, a short document.")] = False,
    plot: Plot = None,
    dtype: Dtype = None,
) -> None:
    """Bytes of a token by bits, and the peak of a process, each against the prediction. On the CPU,
    a process for every setting; JSON on the last line."""
    with errors():
        from kvboost.bench.memory import run_memory

        report = run_memory(
            model,
            bits or ([4] if quick else [16, 8, 4]),
            tokens or ([512] if quick else [2048, 6144]),
            out,
            plot=_text(plot),
            dtype=dtype,
        )
    print(json.dumps(report))


def scaling(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[Sizes, typer.Option(help="Prompt lengths, at least two.")] = None,
    chunks: Annotated[Sizes, typer.Option(help="Chunks in the cache, made up.")] = None,
    requests: Annotated[Sizes, typer.Option(help="Requests at once.")] = None,
    rounds: Rounds = None,
    quick: Annotated[bool, typer.Option(help="Small sizes, two rounds.")] = False,
    plot: Plot = None,
    history: History = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Cost against prompt length, stored chunks (to 100,000) and requests at once, with the
    exponents that fit; JSON on the last line."""
    with errors():
        from kvboost.bench.scaling import Sizes, run_scaling

        small = Sizes((128, 256, 512), (300, 1_000, 3_000), (1, 2, 4), 2)
        usual = small if quick else Sizes()
        sizes = Sizes(
            sorted(tokens or usual.lengths),
            sorted(chunks or usual.chunks),
            sorted(requests or usual.requests),
            rounds or usual.rounds,
        )
        report = run_scaling(model, sizes, out, plot=_text(plot), device=device, dtype=dtype)
        _finish(report, history)


def buglocal(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="qwen2.5-coder-1.5b (scripts/fetch_models.py)."),
    ] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="240 if not given; 200 are needed to say something.")
    ] = None,
    files: Annotated[int | None, typer.Option(min=2, help="In a prompt; 5 if not given.")] = None,
    hint: Annotated[
        str, typer.Option(help="What the question tells of the bug: none, kind, line.")
    ] = "line",
    seed: Annotated[int, typer.Option(help="Of bugs, files and candidates.")] = 0,
    rows: Annotated[
        Path | None, typer.Option(help="Every answer as a JSON line; what is there is not asked.")
    ] = None,
    part: Annotated[str, typer.Option(help="2/3: every third question, from the second.")] = "1/1",
    quick: Annotated[bool, typer.Option(help="The embedded model, one question.")] = False,
    plot: Plot = None,
    history: History = None,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Which function has the bug? Files of the standard library, one with a bug, four functions to
    choose from by likelihood: accuracy and time to first token of baseline, prefix cache and chunk
    reuse.

    On two cores the 1.5B model reads some 150 tokens a second: take a GPU for the full form. With
    --rows a run can be split (--part) and gone on with. JSON on the last line.

    Example: kvboost bench buglocal --device cuda --rows bugs.jsonl
    """
    with errors():
        from kvboost.bench.buglocal import Task, run_buglocal

        task = Task(
            questions or (1 if quick else 240),
            files or (2 if quick else 5),
            hint,
            seed,
            4 if quick else 24,
        )
        report = run_buglocal(
            model or (DEFAULT_MODEL if quick else "qwen2.5-coder-1.5b"),
            task,
            out,
            rows_file=_text(rows),
            part=part,
            plot=_text(plot),
            device=device,
            dtype=dtype,
        )
        _finish(report, history)


def everything(
    folder: Annotated[Path, typer.Option("--out", help="Results, logs and plots go here.")] = Path(
        "bench-results"
    ),
    only: Annotated[list[str] | None, typer.Option(help="Only these benchmarks.")] = None,
    quick: Annotated[bool, typer.Option(help="Short forms: three minutes.")] = False,
    history: History = None,
) -> None:
    """Every benchmark, one after the other, unattended: at most 90 minutes, or three with --quick.
    Ends with 1 if one failed. JSON on the last line."""
    with errors():
        from kvboost.bench.full import run_all

        report = run_all(folder, out, quick=quick, only=only or (), history_file=_text(history))
    print(json.dumps(report))
    if any(one["state"] in ("failed", "timed out", "left out") for one in report["outcomes"]):
        raise typer.Exit(1)


HistoryFile = Annotated[Path, typer.Option("--file", help="Where runs are kept.")]
HISTORY = Path("bench-history.jsonl")


@history_app.command()
def add(
    reports: Annotated[list[Path], typer.Argument(help="Results, as a benchmark printed them.")],
    file: HistoryFile = HISTORY,
    here: Annotated[
        bool, typer.Option("--here", help="Results that name no machine are of this one.")
    ] = False,
) -> None:
    """Adds full runs to the file."""
    with errors():
        from kvboost.bench import history

        entries = [
            history.entry_of(history.read_report(path), measured_here=here) for path in reports
        ]
        for entry in entries:
            history.append(file, entry)
            out.print(
                f"{entry.benchmark} of {entry.date}: {len(entry.figures)} figures added to {file}",
                highlight=False,
            )


@history_app.command()
def show(
    benchmark: Annotated[list[str] | None, typer.Argument(help="Which ones; all.")] = None,
    file: HistoryFile = HISTORY,
    plot: Plot = None,
) -> None:
    """The figures of every run, side by side, by benchmark and machine."""
    with errors():
        from kvboost.bench import history, history_report
        from kvboost.bench.plots import check_plot
        from kvboost.errors import ConfigError

        if plot is not None:
            check_plot(plot)
        groups = history.trend(_chosen(history.load(file), benchmark))
        history_report.show_trend(groups, out)
        if plot is not None:
            if len(groups) != 1:
                raise ConfigError(
                    f"plot={str(plot)!r} shows one benchmark on one machine; there are "
                    f"{len(groups)}: name one"
                )
            history_report.plot_trend(groups[0], plot)


@history_app.command()
def compare(
    benchmark: Annotated[list[str] | None, typer.Argument(help="Which ones; all.")] = None,
    file: HistoryFile = HISTORY,
    against: Annotated[
        str | None, typer.Option(help="A commit or version; the one before if not given.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also what is within the noise.")] = False,
) -> None:
    """What is faster or slower than in the code before. A difference that the spread of the runs
    could be is none; machines are never compared with one another. JSON on the last line."""
    with errors():
        from kvboost.bench import history, history_report

        found = history.compare(_chosen(history.load(file), benchmark), against)
        history_report.show_comparison(found, out, everything=every)
    changes = [
        {
            "benchmark": one.after.benchmark,
            "machine": one.after.machine_name,
            "before": one.before and one.before.code,
            "after": one.after.code,
            "verdicts": {change.figure: change.verdict for change in one.changes},
        }
        for one in found
    ]
    print(json.dumps(changes))


def _chosen(entries: list[Any], benchmarks: list[str] | None) -> list[Any]:
    from kvboost.errors import ConfigError

    chosen = [entry for entry in entries if not benchmarks or entry.benchmark in benchmarks]
    if not chosen:
        known = ", ".join(sorted({entry.benchmark for entry in entries})) or "none"
        raise ConfigError(f"no run of {benchmarks} is there; there are: {known}")
    return chosen


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _finish(report: dict[str, Any], history_file: Path | None) -> None:
    """Remembers a result if that is wished, and prints it for scripts."""
    if history_file is not None:
        from kvboost.bench import history

        history.append(history_file, history.entry_of(report))
    print(json.dumps(report))


def register(app: typer.Typer) -> None:
    """Hangs these commands up under ``kvboost bench``."""
    for command in (breakdown, sweep, memory, scaling, buglocal):
        app.command()(command)
    app.command(name="all")(everything)
    app.add_typer(history_app, name="history")
