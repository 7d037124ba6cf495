"""What has changed between two versions of the code: records of benchmarks, figure by figure.

    python scripts/compare_records.py bench-history.jsonl
    python scripts/compare_records.py old/results.jsonl new/results.jsonl --against 1a2b3c4

A record is a JSON line: what ``kvboost bench NAME --history FILE`` appends, and what ``make bench``
writes to results.jsonl. Only figures with a spread are compared. Two of them differ
only if their intervals do not touch, and still do not after the machine's own drift is taken out:
how much faster or slower the very same work (stock transformers', or ours without reuse) was in
the two runs. Runs of other machines or settings are never compared.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvboost.bench.kit.tables import table
from kvboost.errors import ConfigError, KVBoostError

Record = Mapping[str, Any]

MACHINE = ("cpu", "cores", "threads", "device", "gpu", "dtype")
"""What makes a machine. Versions of libraries may be what changed."""
NAMING = ("num_tokens", "tokens", "bits", "number", "size", "requests", "turn")
"""Numbers that name a row of a list; texts always do."""
CONTROLS = ("stock", "baseline")
"""Work that reuse does not change. The first that both runs have shows the drift of the machine."""
NOISE = "within the noise"
SPREADS = ((("median_ms", "min_ms", "max_ms"), "ms"), (("value", "low", "high"), ""))


@dataclass(frozen=True)
class Figure:
    """What was measured: the middle, and from where to where."""

    value: float
    low: float
    high: float
    unit: str
    """``"ms"``: less is better; ``""``: a share or a ratio."""

    def joined(self, other: Figure) -> Figure:
        """Both together: the same code, run twice."""
        low, high = min(self.low, other.low), max(self.high, other.high)
        return Figure((self.value + other.value) / 2, low, high, self.unit)

    def __str__(self) -> str:
        digits = 0 if self.value >= 100 else 1 if self.value >= 1 else 3
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}-{self.high:.{digits}f}]"


def figures_of(record: Record) -> dict[str, Figure]:
    """Every figure with a spread in a record, by its path."""
    return dict(_walk(record, ()))


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Mapping):
        for keys, unit in (
            (("median_ms", "min_ms", "max_ms"), "ms"),
            (("value", "low", "high"), ""),
        ):
            if set(keys) == set(value):
                middle, low, high = (float(value[key]) for key in keys)
                yield "/".join(path), Figure(middle, low, high, unit)
                return
        for name, inside in value.items():
            yield from _walk(inside, (*path, str(name)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        names = [_name(item) for item in value]
        for at, (item, name) in enumerate(zip(value, names, strict=True)):
            unclear = not name or names.count(name) > 1
            yield from _walk(item, (*path, f"{name}#{at}" if unclear else name))


def _name(item: Any) -> str:
    if not isinstance(item, Mapping):
        return ""
    return " ".join(
        str(value)
        for name, value in item.items()
        if isinstance(value, str) or (name in NAMING and type(value) is int)
    )


def load(path: str | os.PathLike[str]) -> list[Record]:
    """All records of a file, the oldest first."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read ({error.strerror})") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            place_of(record)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{os.fspath(path)}, line {number}, is no record of a benchmark ({error!r}); "
                "remove it"
            ) from error
        records.append(record)
    return sorted(records, key=lambda record: str(record["date"]))


def place_of(record: Record) -> tuple[object, ...]:
    """What must be the same for two runs to be compared."""
    machine = tuple(record["machine"].get(name) for name in MACHINE)
    settings = json.dumps(record.get("settings"), sort_keys=True)
    return (record["benchmark"], record.get("model"), settings, *machine)


def code_of(record: Record) -> str:
    return str(record.get("commit") or record.get("version") or "unknown")


@dataclass(frozen=True)
class Compared:
    """The newest code against the one before it, on one machine; ``before`` is None if there is no
    earlier code."""

    benchmark: str
    machine: str
    before: str | None
    after: str
    changes: Mapping[str, tuple[Figure, Figure, str]]
    """By figure: before, after, and the verdict in words."""
    drift: tuple[float, float] = (1.0, 1.0)
    """How many times as long the same work took in the later runs, least and most."""


def compare(records: Sequence[Record], against: str | None = None) -> list[Compared]:
    """Per benchmark, model, settings and machine: the newest code against the one before it, or
    against the code called ``against``."""
    groups: dict[tuple[object, ...], dict[str, list[Record]]] = {}
    for record in records:
        group = groups.setdefault(place_of(record), {})
        group.setdefault(code_of(record), []).append(record)
    found = []
    for (benchmark, *_), codes in groups.items():
        newest = max(codes, key=lambda code: max(str(one["date"]) for one in codes[code]))
        earlier = [code for code in codes if code != newest and code.startswith(against or "")]
        machine = codes[newest][-1]["machine"]
        name = ", ".join(str(machine[key]) for key in ("gpu", "cpu", "dtype") if machine.get(key))
        if not earlier:
            found.append(Compared(str(benchmark), name, None, newest, {}))
            continue
        before, after = _joined(codes[earlier[-1]]), _joined(codes[newest])
        drift = drift_of(before, after)
        changes = {
            figure: (before[figure], value, verdict(before[figure], value, drift))
            for figure, value in after.items()
            if figure in before
        }
        found.append(Compared(str(benchmark), name, earlier[-1], newest, changes, drift))
    return found


def _joined(records: Sequence[Record]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for record in records:
        for name, figure in figures_of(record).items():
            figures[name] = figures[name].joined(figure) if name in figures else figure
    return figures


def drift_of(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> tuple[float, float]:
    """How many times as long work took that no change of ours affects: least and most."""
    for control in CONTROLS:
        ratios = [
            after[name].value / figure.value
            for name, figure in before.items()
            if name in after and figure.unit == "ms" and control in name and figure.value > 0
        ]
        if ratios:
            return min(ratios), max(ratios)
    return 1.0, 1.0


def verdict(before: Figure, after: Figure, drift: tuple[float, float] = (1.0, 1.0)) -> str:
    """In words. A difference that the spread of either could be, as it is or with ``drift``, is
    noise."""
    slowest = max(1.0, drift[1]) if after.unit == "ms" else 1.0
    fastest = min(1.0, drift[0]) if after.unit == "ms" else 1.0
    if after.low <= before.high * slowest and before.low * fastest <= after.high:
        return NOISE
    if after.unit == "ms":
        if after.value < before.value:
            return f"faster by {before.value / after.value:.2f} ×"
        return f"slower by {after.value / before.value:.2f} ×"
    difference = after.value - before.value
    return f"{'higher' if difference > 0 else 'lower'} by {abs(difference):.3g}"


def comparison_table(one: Compared, *, everything: bool = False) -> Table | str:
    """What changed, or all figures; a sentence if there is nothing to compare with."""
    title = f"{one.benchmark}: {one.machine}"
    if one.before is None:
        return f"{title}: no earlier code to compare with"
    real = {name: change for name, change in one.changes.items() if change[2] != NOISE}
    quiet = f"{len(one.changes) - len(real)} of {len(one.changes)} figures {NOISE}"
    low, high = one.drift
    moved = f"; the same work without reuse took {low:.2f} to {high:.2f} times as long"
    chosen = one.changes if everything else real
    return table(
        f"{title}\n{quiet}{moved if one.drift != (1.0, 1.0) else ''}",
        ("figure",),
        (one.before, one.after, "verdict"),
        [(name, str(old), str(new), word) for name, (old, new, word) in chosen.items()],
    )


def main(
    files: Annotated[list[Path], typer.Argument(help="Files of records, one JSON line each.")],
    benchmark: Annotated[list[str] | None, typer.Option(help="Only these benchmarks.")] = None,
    against: Annotated[
        str | None, typer.Option(help="A commit or version; the one before if not given.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Also show what did not change.")] = False,
) -> None:
    """Compare records: what is faster or slower than in the code before? JSON on the last line."""
    console = Console()
    try:
        records = [record for file in files for record in load(file)]
    except KVBoostError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    chosen = [one for one in records if not benchmark or one["benchmark"] in benchmark]
    found = compare(sorted(chosen, key=lambda record: str(record["date"])), against)
    for one in found:
        console.print(comparison_table(one, everything=every), highlight=False)
    verdicts = [
        {"benchmark": one.benchmark, "machine": one.machine, "before": one.before}
        | {"after": one.after, "verdicts": {name: told for name, (*_, told) in one.changes.items()}}
        for one in found
    ]
    print(json.dumps(verdicts))


if __name__ == "__main__":
    typer.run(main)
