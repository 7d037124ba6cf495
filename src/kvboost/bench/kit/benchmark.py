"""The shape of every benchmark: settings go in, a report comes out.

A benchmark is a module with a class ``Settings`` and a function ``run(settings, bench) -> Report``.
The fields of ``Settings`` are the options of its command. The kit does the rest: it checks the
options, loads the model, says how long the run will take, prints the tables, draws the figure and
writes the JSON record.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, get_type_hints

from rich.console import Console, RenderableType

from kvboost.bench.kit.goals import Goal, show_goals
from kvboost.config import DEFAULT_MODEL, at_least, one_of, whole, within
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvboost import KVBoost
    from kvboost.model.loading.load import LoadedModel

CALIBRATION_TOKENS = 256


ROUNDS = "Rounds; every figure is the median over them."


@dataclass(frozen=True)
class Option:
    """The meaning of a setting and the values it may have. The values of a tuple are checked one by
    one."""

    help: str
    flag: str | None = None
    """The name on the command line if it is not that of the field, for instance ``pattern``."""
    least: float | None = None
    most: float | None = None
    choices: Sequence[str | int] = ()

    def check(self, value: Any, name: str) -> None:
        if self.choices:
            one_of(value, self.choices, name)
        if self.least is not None and self.most is not None:
            within(value, self.least, self.most, name)
        elif self.least is not None and isinstance(value, int):
            whole(value, int(self.least), name)
        elif self.least is not None:
            at_least(value, self.least, name)


def option(default: Any, help: str, flag: str | None = None, **limits: Any) -> Any:
    """A field of ``Settings``: its default, its meaning and the limits of an ``Option``."""
    return field(default=default, metadata={"option": Option(help, flag, **limits)})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a benchmark. Validated on creation: raises ``ConfigError``."""

    QUICK: ClassVar[Mapping[str, Any]] = {}
    """The settings that ``--quick`` changes."""

    def __post_init__(self) -> None:
        for name, (_, option) in options_of(type(self)).items():
            value = getattr(self, name)
            for one in value if isinstance(value, tuple) else (value,):
                if one is not None:
                    option.check(one, option.flag or name)

    def tokens_read(self) -> float:
        """About how many prompt tokens a run reads without reuse; 0 if unknown. The kit
        times a short prefill and tells the user how long the run will take."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings of a benchmark that loads a model."""

    model: str = option(DEFAULT_MODEL, "A bundled name, a folder, a .gguf file or a hub id.")
    device: str | None = option(None, "cpu, cuda or mps; the best one there is if not given.")
    dtype: str | None = option(
        None, "float32, bfloat16 or float16; what suits the device if not given."
    )


def options_of(kind: type[Settings]) -> dict[str, tuple[Any, Option]]:
    """The type and the ``Option`` of every field of ``kind``, those of its own first."""
    types = get_type_hints(kind)
    found = {
        one.name: (types[one.name], one.metadata["option"]) for one in dataclasses.fields(kind)
    }
    shared = set(ModelSettings.__dataclass_fields__)
    return dict(sorted(found.items(), key=lambda item: item[0] in shared))


@dataclass
class Report:
    """The findings of a benchmark."""

    figures: dict[str, Any]
    """For the JSON record."""
    shown: Sequence[RenderableType] = ()
    """Tables and sentences, in the order they are printed."""
    goals: Sequence[Goal] = ()
    draw: Callable[[str], Figure] | None = None
    """Makes the picture; is given a title."""
    problems: Sequence[str] = ()
    """Things that must not happen and did; the command then ends with status 1."""


class Module(Protocol):
    """The module of a benchmark."""

    Settings: type[Settings]

    @staticmethod
    def run(settings: Any, bench: Bench) -> Report: ...


@dataclass(frozen=True)
class Benchmark:
    """An entry of the list. Light: the module is imported when it is needed."""

    name: str
    question: str
    """The question that it answers, in one line."""
    module: str
    goals: tuple[str, ...] = ()
    """The goals; the report says whether they were reached."""
    long_running: bool = False
    """Whether the process bounds torch's kernel caches, as the server does."""

    def load(self) -> Module:
        return cast(Module, import_module(self.module))

    def settings(self, *, quick: bool = False, **given: Any) -> Settings:
        """Settings with these values, the short form's or the usual ones."""
        kind = self.load().Settings
        return kind(**{**(kind.QUICK if quick else {}), **given})

    def perform(
        self,
        settings: Settings,
        console: Console,
        *,
        plot: Path | None = None,
        output: Path | None = None,
    ) -> dict[str, Any]:
        """Runs the benchmark and shows what it found; returns its record, which is also written
        to ``output``."""
        from kvboost.bench.kit.figures import check_plot, save
        from kvboost.bench.kit.record import record

        if plot is not None:
            check_plot(plot)
        check_folder(output, "output")
        bench = Bench(console, settings)
        report = self.load().run(settings, bench)
        for part in report.shown:
            console.print(part, highlight=False)
        show_goals(console, report.goals)
        for problem in list(dict.fromkeys(report.problems))[:20]:
            console.print(f"! {problem}", style="red", highlight=False, markup=False)
        if plot is not None and report.draw is not None:
            save(report.draw(f"{self.name}: {bench.title}"), plot)
            console.print(f"drawn in {plot}", highlight=False)
        elif plot is not None:
            console.print("nothing was drawn: this benchmark has no picture", highlight=False)
        asked = dataclasses.asdict(settings)
        made = record(
            self.name, asked, bench.machine, report.figures, report.goals, report.problems
        )
        if output is not None:
            output.write_text(json.dumps(made, indent=2) + "\n")
        return made


@dataclass
class Bench:
    """A running benchmark's view of the kit."""

    console: Console
    settings: Settings
    machine: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The model and the machine, for a picture."""
        chip = self.machine.get("gpu") or self.machine.get("cpu")
        parts = getattr(self.settings, "model", None), self.machine.get("dtype"), chip
        return ", ".join(str(part) for part in parts if part)

    def load_engine(self) -> KVBoost:
        """The model of the settings in an engine; says how long the run will take."""
        from kvboost import KVBoost

        asked = cast(ModelSettings, self.settings)
        engine = KVBoost.from_pretrained(asked.model, device=asked.device, dtype=asked.dtype)
        self.describe(engine.device, engine.dtype)
        self._estimate(engine)
        return engine

    def load_model(self) -> LoadedModel:
        """The model of the settings, for several engines."""
        from kvboost import KVBoost
        from kvboost.config import EngineConfig
        from kvboost.model.loading.load import load

        asked = cast(ModelSettings, self.settings)
        loaded = load(asked.model, device=asked.device, dtype=asked.dtype)
        self.describe(loaded.device, loaded.forward.shape.dtype)
        # Several processes may share a GPU: a short prefill needs little of it.
        with KVBoost(loaded, EngineConfig(max_kv_bytes=1 << 30, gpu_cache_bytes=0)) as engine:
            self._estimate(engine)
        return loaded

    def describe(self, device: object, dtype: object, **more: object) -> None:
        """Notes and shows which machine this is."""
        from kvboost.bench.kit.machine import describe

        self.machine = {**describe(device, dtype), **more}
        self.console.print(self.machine)

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False)

    def _estimate(self, engine: KVBoost) -> None:
        needed = self.settings.tokens_read()
        if not needed:
            return
        speed = reading_speed(engine)
        short = dataclasses.replace(self.settings, **self.settings.QUICK).tokens_read()
        told = f"about {duration(needed / speed)} on this machine ({speed:,.0f} tokens/s read)"
        if short < 0.7 * needed:
            told += f"; --quick takes about {duration(short / speed)}"
        self.say(told)


def reading_speed(engine: KVBoost) -> float:
    """Prompt tokens per second without reuse, from one short prefill."""
    text = "The quick brown fox jumps over the lazy dog. " * CALIBRATION_TOKENS
    ids = engine.encode(text)[: min(CALIBRATION_TOKENS, (engine.context_length or 1 << 30) - 1)]
    engine.generate(ids[:16], 1, "baseline")
    start = time.perf_counter()
    engine.generate(ids, 1, "baseline")
    return len(ids) / (time.perf_counter() - start)


def duration(seconds: float) -> str:
    """As people say it."""
    if seconds < 90:
        return f"{max(1, round(seconds))} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def check_folder(path: str | Path | None, name: str) -> None:
    """Raises ``ConfigError`` if nothing can be written at ``path``."""
    folder = str(Path(path).absolute().parent) if path is not None else "."
    if not Path(folder).is_dir():
        raise ConfigError(f"{name}={str(path)!r}: there is no folder {folder!r}; create it")
