"""Results over time: a small file that every full run may be added to, and what has changed since.

One JSON line a run: when, which code, which machine, and every figure that has a spread. A figure
without one says nothing about a difference, so it is left out. Two figures differ only if the
intervals they were seen in do not touch, and still do not when the machine's own mood is taken out:
how much faster or slower the very same work (stock transformers', or ours without reuse) was in the
two runs. Runs of other machines or settings are never looked at together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvboost.bench.record import code, here
from kvboost.errors import ConfigError

MACHINE = ("cpu", "cores", "threads", "device", "gpu", "dtype")
"""What makes a machine, and how it computes. Versions of libraries may be what changed."""
NAMING = ("num_tokens", "tokens", "words", "bits", "number", "size", "requests", "chunks", "turn")
"""Numbers that say which row of a list this is; texts always do."""
SETTINGS = ("rounds", "questions", "requests", "tokens", "part", "task", "plan")
"""What is asked of a benchmark; another question has another answer."""
CONTROLS = ("stock", "baseline", "full prefill")
"""Work that reuse does not change. The first of them that both runs have says how fast the machine
was: stock transformers' own if there is one."""
NOISE = "within the noise"


@dataclass(frozen=True)
class Figure:
    """What was seen: the middle, and from where to where."""

    value: float
    low: float
    high: float
    unit: str
    """``"ms"``: less is better; ``""``: a share or a ratio."""

    def joined(self, other: Figure) -> Figure:
        """Both together: the same code, run twice."""
        return Figure(
            (self.value + other.value) / 2,
            min(self.low, other.low),
            max(self.high, other.high),
            self.unit,
        )


@dataclass(frozen=True)
class Entry:
    """One run of one benchmark."""

    benchmark: str
    date: str
    version: str | None
    commit: str | None
    model: str | None
    machine: dict[str, Any]
    settings: dict[str, Any]
    figures: dict[str, Figure]

    @property
    def place(self) -> tuple[object, ...]:
        """What must be the same for two runs to be compared."""
        told = tuple(self.machine.get(name) for name in MACHINE)
        return (self.benchmark, self.model, json.dumps(self.settings, sort_keys=True), *told)

    @property
    def code(self) -> str:
        return self.commit or self.version or "unknown"

    @property
    def machine_name(self) -> str:
        parts = (self.machine.get("gpu") or self.machine.get("cpu"), self.machine.get("dtype"))
        return ", ".join(str(part) for part in parts if part)


def figures_of(report: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure with a spread in a benchmark's JSON, by where it stands."""
    return dict(_walk(report, ()))


def _walk(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, Mapping):
        figure = _figure(value)
        if figure is not None:
            yield "/".join(path), figure
            return
        for name, inside in value.items():
            yield from _walk(inside, (*path, str(name)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        names = [_name(item) for item in value]
        for at, (item, name) in enumerate(zip(value, names, strict=True)):
            unclear = not name or names.count(name) > 1
            yield from _walk(item, (*path, f"{name}#{at}" if unclear else name))


def _figure(value: Mapping[str, Any]) -> Figure | None:
    for names, unit in ((("median_ms", "min_ms", "max_ms"), "ms"), (("value", "low", "high"), "")):
        if set(names) == set(value):
            middle, low, high = (float(value[name]) for name in names)
            return Figure(middle, low, high, unit)
    return None


def _name(item: Any) -> str:
    if not isinstance(item, Mapping):
        return ""
    return " ".join(
        str(value)
        for name, value in item.items()
        if isinstance(value, str) or (name in NAMING and type(value) is int)
    )


def read_report(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A benchmark's JSON: the last line of what it printed, or a file of it."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read ({error.strerror})") from error
    for candidate in (text, text.strip().rpartition("\n")[2]):
        try:
            report = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(report, dict) and isinstance(report.get("benchmark"), str):
            return report
    raise ConfigError(
        f"{os.fspath(path)} is no result of a benchmark; give a file that ends with the JSON line "
        "it prints"
    )


def entry_of(report: Mapping[str, Any], *, measured_here: bool = False) -> Entry:
    """A run for the file. A report that does not name its machine must have been ``measured_here``;
    one that does not name its code is taken for this code's."""
    machine = report.get("machine")
    if not isinstance(machine, Mapping):
        if not measured_here:
            raise ConfigError(
                f"the result of {report['benchmark']!r} names no machine; if it was measured on "
                "this one, say so with --here"
            )
        machine = here()
    figures = figures_of(report)
    if not figures:
        raise ConfigError(
            f"the result of {report['benchmark']!r} has no figure with a spread; there is nothing "
            "a later run could be compared with"
        )
    own = code()
    return Entry(
        report["benchmark"],
        str(report.get("date", "")),
        report.get("version", own["version"]),
        report.get("commit", own["commit"]),
        report.get("model"),
        dict(machine),
        {name: report[name] for name in SETTINGS if name in report},
        figures,
    )


def append(path: str | os.PathLike[str], entry: Entry) -> None:
    try:
        with open(path, "a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")
    except OSError as error:
        raise ConfigError(
            f"history={os.fspath(path)!r} cannot be written ({error.strerror})"
        ) from error


def load(path: str | os.PathLike[str]) -> list[Entry]:
    """All runs, the oldest first."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"history={os.fspath(path)!r} cannot be read ({error.strerror}); add a run with "
            "kvboost bench history add"
        ) from error
    entries = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["figures"] = {name: Figure(**one) for name, one in row["figures"].items()}
            entries.append(Entry(**row))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"history={os.fspath(path)!r}, line {number}, is no run ({error!r}); remove it"
            ) from error
    return sorted(entries, key=lambda entry: entry.date)


@dataclass(frozen=True)
class Change:
    """One figure in the newest code, and in the code before it."""

    figure: str
    before: Figure
    after: Figure
    verdict: str


@dataclass(frozen=True)
class Compared:
    """The newest run of a benchmark on a machine against the code before it, or against nothing."""

    after: Entry
    before: Entry | None
    runs: tuple[int, int]
    """How many runs of each code there are; the spread of all of them counts."""
    changes: tuple[Change, ...]
    drift: tuple[float, float] = (1.0, 1.0)
    """How many times as long the same work took in the later runs, least and most."""


def compare(entries: Sequence[Entry], against: str | None = None) -> list[Compared]:
    """Per benchmark, model and machine: the newest code against the one before it, or against the
    code called ``against``."""
    found = []
    for group in _by_place(entries):
        codes: dict[str, list[Entry]] = {}
        for entry in group:
            codes.setdefault(entry.code, []).append(entry)
        newest = group[-1].code
        earlier = [name for name in codes if name != newest]
        if against is not None:
            earlier = [name for name in earlier if name.startswith(against)]
        if not earlier:
            found.append(Compared(group[-1], None, (len(codes[newest]), 0), ()))
            continue
        old, new = codes[earlier[-1]], codes[newest]
        before, after = _joined(old), _joined(new)
        mood = drift(before, after)
        changes = tuple(
            Change(name, before[name], figure, verdict(before[name], figure, mood))
            for name, figure in after.items()
            if name in before
        )
        found.append(Compared(new[-1], old[-1], (len(new), len(old)), changes, mood))
    return found


def drift(before: Mapping[str, Figure], after: Mapping[str, Figure]) -> tuple[float, float]:
    """How many times as long work took that no change of ours concerns: least and most. One to one
    where there is none."""
    for control in CONTROLS:
        ratios = [
            after[name].value / figure.value
            for name, figure in before.items()
            if name in after and figure.unit == "ms" and control in name and figure.value > 0
        ]
        if ratios:
            return min(ratios), max(ratios)
    return 1.0, 1.0


def verdict(before: Figure, after: Figure, mood: tuple[float, float] = (1.0, 1.0)) -> str:
    """In words. Nothing is called better or worse that the spread of either could be, as it is or
    with ``mood``: so many times as long the machine took for the same, least and most."""
    slowest = max(1.0, mood[1]) if after.unit == "ms" else 1.0
    fastest = min(1.0, mood[0]) if after.unit == "ms" else 1.0
    if after.low <= before.high * slowest and before.low * fastest <= after.high:
        return NOISE
    if after.unit == "ms":
        if after.value < before.value:
            return f"faster by {before.value / after.value:.2f} ×"
        return f"slower by {after.value / before.value:.2f} ×"
    difference = after.value - before.value
    return f"{'higher' if difference > 0 else 'lower'} by {abs(difference):.3g}"


def trend(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Runs that may be shown side by side, the oldest first."""
    return _by_place(entries)


def _joined(entries: Sequence[Entry]) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for entry in entries:
        for name, figure in entry.figures.items():
            figures[name] = figures[name].joined(figure) if name in figures else figure
    return figures


def _by_place(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.place, []).append(entry)
    return list(groups.values())
