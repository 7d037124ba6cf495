"""``kvboost quality``: how far answers over reused text are from those of a full prefill.

The passages of each question follow the chat template's header in a prompt. They were read before
in one of several ways, the donor kinds. A strategy then serves the prompt, and its distributions
over the full model's own answer are compared with those of the full model. Instead of a question,
something long may be asked for, such as a summary (``--task``). Engines may also differ in how
many bits they keep text. Rows are kept as they are measured, so that an interrupted run goes on and
several processes share one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import ClassVar

from rich.console import RenderableType

from kvboost import ConfigError, KVBoost
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, check_folder, option
from kvboost.bench.kit.figures import Figure
from kvboost.bench.quality.asked import MOST_BYTES, Asked, Cell
from kvboost.bench.quality.long_tables import long_figure, long_tables
from kvboost.bench.quality.noise import NoiseFloor, kinds_of
from kvboost.bench.quality.rows import (
    DEFAULT_KEPT,
    DONORS,
    NOISE,
    QUESTIONS,
    Row,
    append_rows,
    load_rows,
    saved_rows,
)
from kvboost.bench.quality.summary import (
    COLUMNS,
    RATIO_FREE,
    Summary,
    quality_figure,
    quality_tables,
    summarize,
)
from kvboost.bench.quality.tasks import Asking, choose
from kvboost.bench.texts.questions import Question, make_questions
from kvboost.config import (
    CONTROL,
    CONTROLS,
    DEFAULT_RATIO,
    KV_BITS,
    STRATEGIES,
    WITHOUT_RATIO,
    EngineConfig,
)
from kvboost.model.loading.load import LoadedModel, load
from kvboost.progress import Progress

DECODING = 20
"""A token of an answer takes about as long as this many tokens of a prompt."""


@dataclass(frozen=True, kw_only=True)
class Settings(Asking, ModelSettings):
    QUICK: ClassVar = {
        "limit": 1,
        "passages": 3,
        "passage_tokens": 128,
        "answer_tokens": 6,
        "donors": ("header",),
    }

    strategies: tuple[str, ...] = option(
        ("auto", CONTROL, "cacheblend", *WITHOUT_RATIO),
        "How moved text is repaired; random takes as many rows as auto has paid for, selective the "
        "ends of each passage, none nothing.",
        "strategy",
        choices=(*STRATEGIES, *CONTROLS),
    )
    ratios: tuple[float, ...] = option(
        (DEFAULT_RATIO,), "Share of moved rows to recompute.", "ratio", least=0, most=1
    )
    donors: tuple[str, ...] = option(
        ("alone", "header", "other", "reordered"),
        "How passages were read before; exact is the whole prompt.",
        "donor",
        choices=tuple(DONORS),
    )
    bits: tuple[int, ...] = option((16,), "Bits of a kept number.", choices=KV_BITS)
    margin: float = option(0.03, "Loss of F1 that is called none.", least=0)
    noise: bool = option(
        False,
        "Also measure bfloat16 on the same answers, the floor of the deviation; needs float32. "
        "Slow where a processor has no bfloat16.",
    )
    save: str | None = option(
        None, "Keep every row, as JSON lines, at once. What the file has is not measured again."
    )
    load: tuple[str, ...] = option(
        (), "Show rows that were saved instead of measuring; 'rows-*.jsonl' merges parts."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folder(self.save, "save")

    @property
    def kept(self) -> dict[str, int]:
        """The bits of every way of keeping, by its name."""
        return {f"{bits} bits": bits for bits in self.bits}

    @property
    def cells(self) -> list[Cell]:
        """Every strategy with its ratios."""
        return [
            Cell(strategy, ratio)
            for strategy in self.strategies
            for ratio in ((0.0,) if strategy in RATIO_FREE else self.ratios)
        ]

    @property
    def rows_per_question(self) -> int:
        noise = len(kinds_of(self.task)) if self.noise else 0
        return len(self.kept) * len(self.donors) * len(self.cells) + noise

    def tokens_read(self) -> float:
        served = 1 + 0.4 * len(self.cells)
        prompt = self.passages * min(self.passage_tokens, 220)
        questions = (self.limit or 20) * max(1, len(self.datasets))
        cells = len(self.kept) * len(self.donors)
        written = 0
        if self.task != QUESTIONS:
            written = DECODING * self.longest_answer * (2 + cells * len(self.cells))
        return questions * (prompt * (2 + cells * served) + written)


def run(settings: Settings, bench: Bench) -> Report:
    rows = load_rows(settings.load) if settings.load else _measure_all(settings, bench)
    summaries = summarize(rows)
    told = [{**asdict(one), "within_margin": one.is_within(settings.margin)} for one in summaries]
    return Report(
        {"summaries": told},
        list(_tables(summaries, settings.margin)),
        draw=partial(_figure, summaries),
    )


def _tables(summaries: Sequence[Summary], margin: float) -> Iterator[RenderableType]:
    """Those of questions, then those of long answers."""
    if questions := [one for one in summaries if one.long is None]:
        yield COLUMNS
        yield from quality_tables(questions, margin)
    if len(questions) < len(summaries):
        yield from long_tables(summaries)


def _figure(summaries: Sequence[Summary], title: str) -> Figure:
    has_long = any(one.long is not None for one in summaries)
    return (long_figure if has_long else quality_figure)(summaries, title)


def _measure_all(settings: Settings, bench: Bench) -> list[Row]:
    """Measures what the file of an earlier run does not have yet, and adds it there."""
    questions = choose(settings)
    known = {row.key: row for row in saved_rows(settings.save)}
    loaded = bench.load_model()
    noise = None
    if settings.noise:
        if loaded.forward.shape.dtype.itemsize != 4:
            raise ConfigError("noise compares bfloat16 with float32; give --dtype float32 too")
        noise = NoiseFloor(load(settings.model, device=settings.device, dtype="bfloat16"))
    total = len(questions) * settings.rows_per_question
    with (
        Progress(f"{len(questions)} questions, {len(settings.donors)} donor kinds") as progress,
        progress.step("served", total) as step,
    ):
        for some in measure(loaded, questions, settings, step.advance, known, noise):
            if settings.save is not None:
                append_rows(some, settings.save)
            known |= {row.key: row for row in some}
    return list(known.values())


def measure(
    loaded: LoadedModel,
    questions: Sequence[Question],
    settings: Settings,
    on_cell: Callable[[], None] = lambda: None,
    known: Mapping[tuple[str, str, str, str, float], Row] | None = None,
    noise: NoiseFloor | None = None,
) -> Iterator[list[Row]]:
    """For every question: its rows with every donor kind, way of keeping, strategy and ratio, but
    not those that are ``known``. A question with fewer passages than the settings ask for uses
    those it has. Nothing is timed before one question has been answered, since the first runs of a
    process are slow."""
    known = known or {}
    engines = {
        kept: KVBoost(
            loaded,
            EngineConfig(
                kv_cache_bits=bits,
                reuse_moved="always",
                max_kv_bytes=MOST_BYTES,
                gpu_cache_bytes=MOST_BYTES,
            ),
        )
        for kept, bits in settings.kept.items()
    }
    first = next(iter(engines.values()))
    try:
        for number, question in enumerate(questions):
            if all(key in known for key in _keys(question, settings)):
                for _ in range(settings.rows_per_question):
                    on_cell()
                continue
            other = questions[(number + 1) % len(questions)]
            if other is question:
                other = make_questions(1, seed=1)[0]
            asked = Asked(first, question, other, settings, seed=number)
            rows: list[Row] = []
            for (kept, engine), donor in product(engines.items(), settings.donors):
                here, salt = asked.through(engine, kept), f"quality-{donor}"
                here.read_before(donor, salt)
                paid: dict[float, float] = {}
                for cell in settings.cells:
                    row = known.get((question.question, donor, kept, cell.strategy, cell.ratio))
                    if row is None:
                        row = here.served(donor, cell, salt, paid.get(cell.ratio))
                        rows.append(row)
                    if cell.strategy == "auto":
                        paid[cell.ratio] = row.charged_share
                    on_cell()
                engine.forget_salt(salt)
            if noise is not None:
                rows += noise.rows(asked)
                for _ in kinds_of(settings.task):
                    on_cell()
            yield rows
    finally:
        for engine in engines.values():
            engine.close()
        if noise is not None:
            noise.close()


def _keys(question: Question, settings: Settings) -> Iterator[tuple[str, str, str, str, float]]:
    """Of all rows of a question."""
    for kept, donor in product(settings.kept, settings.donors):
        for cell in settings.cells:
            yield question.question, donor, kept, cell.strategy, cell.ratio
    if settings.noise:
        for kind in kinds_of(settings.task):
            yield question.question, NOISE, DEFAULT_KEPT, kind, 0.0
