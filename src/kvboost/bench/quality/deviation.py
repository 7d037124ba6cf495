"""``kvboost quality``: how far answers over reused text are from those of a full prefill.

The passages of each question follow the chat template's header in a prompt. They were read before
in one of several ways, the donor kinds. A strategy then serves the prompt, and its distributions
over the full model's own answer are compared with those of the full model. Engines may also differ
in how they cut text into chunks and in how many bits they keep it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from rich.table import Table

from kvboost import ConfigError, GenerationMode, KVBoost, SpanKind
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, check_folder, option
from kvboost.bench.kit.figures import Figure, draw_lines
from kvboost.bench.kit.stats import f1, paired_bootstrap
from kvboost.bench.kit.tables import dim, table
from kvboost.bench.texts.questions import Question, choose_questions, make_questions
from kvboost.config import CHUNKING, KV_BITS, STRATEGIES, EngineConfig
from kvboost.model.load import LoadedModel
from kvboost.progress import Progress
from kvboost.results import kl_divergence

EXACT = "exact"
DONORS = {
    "alone": "each passage read by itself",
    "header": "each passage read after the chat template's header",
    "other": "each passage read after the header and a passage of another question",
    "reordered": "all passages read in one earlier request, in another order",
    EXACT: "the same prompt read before: exact hits",
}
RATIO_FREE = ("none", "selective")
"""Strategies that no ratio changes: they run once."""
ROUNDING = 1e-6
"""A KL below this comes from the order of additions only; it is drawn as zero."""
ALL_CHUNKS = 1_000_000
COLUMNS = dim(
    """ratio    share of moved rows that was recomputed
paid     what repair cost per moved row, probes included
KL       deviation from full prefill over its answer: mean over questions, and median
top-1    tokens of the answer that stay the likeliest
same     questions with the very same greedy answer
at       where the others first differ, in tokens
F1/full  of the answers, with reuse and with full prefill
95 %     interval of the paired difference of F1
TTFT     time until the logits were there, as a share of full prefill's
hits     rows of the prompt that were not computed; B/token: bytes of a row in the cache"""
)


@dataclass(frozen=True)
class Kept:
    """How an engine cuts text and keeps it."""

    chunking: str = "fixed"
    chunk_size: int = 128
    bits: int = 16

    def __str__(self) -> str:
        return f"{self.chunking} {self.chunk_size}, {self.bits} bits"


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How questions are asked."""

    passages: int = option(8, "Passages in a prompt.", least=2)
    passage_tokens: int = option(256, "The most tokens of a passage.", least=64)
    answer_tokens: int = option(16, "The most tokens of an answer.", least=1)


@dataclass(frozen=True, kw_only=True)
class Settings(Asking, ModelSettings):
    QUICK: ClassVar = {
        "limit": 1,
        "passages": 3,
        "passage_tokens": 128,
        "answer_tokens": 6,
        "donors": ("header",),
    }

    datasets: tuple[str, ...] = option(
        (),
        "JSON lines with question, answers and passages; made-up questions if not given.",
        "dataset",
    )
    strategies: tuple[str, ...] = option(
        ("auto", "cacheblend", "selective", "none"),
        "How moved text is repaired.",
        "strategy",
        choices=STRATEGIES,
    )
    ratios: tuple[float, ...] = option(
        (0.15,), "Share of moved rows to recompute.", "ratio", least=0, most=1
    )
    donors: tuple[str, ...] = option(
        tuple(donor for donor in DONORS if donor != EXACT),
        "How passages were read before; exact is the whole prompt.",
        "donor",
        choices=tuple(DONORS),
    )
    chunkings: tuple[str, ...] = option(
        ("fixed",), "Where text is cut into chunks.", "chunking", choices=CHUNKING
    )
    chunk_sizes: tuple[int, ...] = option((128,), "Tokens of a chunk.", "chunk-size", least=8)
    bits: tuple[int, ...] = option((16,), "Bits of a kept number.", choices=KV_BITS)
    limit: int | None = option(None, "Questions of every file; 20 if they are made up.", least=1)
    part: str = option("1/1", "2/3: every third question, from the second.")
    save: str | None = option(None, "Keep every row, as JSON lines.")
    load: tuple[str, ...] = option((), "Show rows that were saved instead of measuring.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folder(self.save, "save")

    @property
    def kept(self) -> list[Kept]:
        return [Kept(*one) for one in product(self.chunkings, self.chunk_sizes, self.bits)]

    @property
    def cells(self) -> list[tuple[str, float]]:
        """Every strategy with its ratios."""
        return [
            (strategy, ratio)
            for strategy in self.strategies
            for ratio in ((0.0,) if strategy in RATIO_FREE else self.ratios)
        ]

    def tokens_read(self) -> float:
        served = 1 + 0.4 * len(self.cells)
        prompt = self.passages * min(self.passage_tokens, 220)
        questions = (self.limit or 20) * max(1, len(self.datasets))
        return prompt * questions * (2 + len(self.kept) * len(self.donors) * served)


@dataclass(frozen=True)
class Row:
    """One question, served in one way."""

    question: str
    donor: str
    strategy: str
    ratio: float
    kl: float
    """Mean over the answer's tokens."""
    top1: float
    """The share of the answer's tokens that stay the likeliest."""
    first_difference: int | None
    """The first token that does not; None if the greedy answer is the same text."""
    f1: float
    full_f1: float
    ttft_ratio: float
    """Time until the answer's logits were there, as a share of full prefill's."""
    charged_share: float
    kept: str = str(Kept())
    hit_rate: float = 0.0
    """Share of the prompt's rows that were not computed."""
    bytes_per_token: float = 0.0


@dataclass(frozen=True)
class Summary:
    """All rows of a strategy, a ratio, a donor kind and a way of keeping."""

    donor: str
    kept: str
    strategy: str
    ratio: float
    count: int
    mean_kl: float
    median_kl: float
    top1: float
    same_text: float
    first_difference: float | None
    f1: float
    full_f1: float
    f1_difference: tuple[float, float]
    """95 % interval of the mean paired difference."""
    ttft_ratio: float
    charged_share: float
    hit_rate: float
    bytes_per_token: float


def run(settings: Settings, bench: Bench) -> Report:
    if settings.load:
        rows = load_rows(settings.load)
    else:
        questions = choose_questions(settings.datasets, settings.limit, settings.part)
        loaded = bench.load_model()
        total = len(questions) * len(settings.donors) * len(settings.kept) * len(settings.cells)
        with (
            Progress(f"{len(questions)} questions, {len(settings.donors)} donor kinds") as progress,
            progress.step("served", total) as step,
        ):
            rows = list(measure(loaded, questions, settings, step.advance))
    if settings.save is not None:
        save_rows(rows, settings.save)
    summaries = summarize(rows)
    pooled = pool(summaries, ("alone", "header", "other"))
    return Report(
        {
            "summaries": [asdict(summary) for summary in summaries],
            "pooled": [
                {"strategy": strategy, "ratio": ratio, "mean_kl": mean_kl}
                for (strategy, ratio), mean_kl in pooled.items()
            ],
        },
        [COLUMNS, *quality_tables(summaries)],
        draw=partial(quality_figure, summaries),
    )


def measure(
    loaded: LoadedModel,
    questions: Sequence[Question],
    settings: Settings,
    on_cell: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Every question with every donor kind, way of keeping, strategy and ratio. A question with
    fewer passages than the settings ask for uses those it has. Nothing is timed before one
    question has been answered, since the first runs of a process are slow."""
    engines = {
        kept: KVBoost(
            loaded,
            EngineConfig(
                chunking=kept.chunking,
                chunk_size=kept.chunk_size,
                kv_cache_bits=kept.bits,
                reuse_moved="always",
            ),
        )
        for kept in settings.kept
    }
    first = next(iter(engines.values()))
    try:
        for number, question in enumerate(questions):
            other = questions[(number + 1) % len(questions)]
            if other is question:
                other = make_questions(1, seed=1)[0]
            asked = Asked(first, question, other, settings, seed=number)
            for (kept, engine), donor in product(engines.items(), settings.donors):
                here, salt = asked.through(engine, str(kept)), f"quality-{donor}"
                here.read_before(donor, salt)
                for strategy, ratio in settings.cells:
                    yield here.served(donor, strategy, ratio, salt)
                    on_cell()
                engine.forget_salt(salt)
    finally:
        for engine in engines.values():
            engine.close()


class Asked:
    """A question whose full answer is known."""

    def __init__(
        self, engine: KVBoost, question: Question, other: Question, asking: Asking, seed: int
    ) -> None:
        self._engine = engine
        self._kept = str(Kept())
        self._question = question
        self._seed = seed
        self._asking = asking
        self._documents = self._cut(question)
        self._others = self._cut(other)
        ask = f"Question: {question.question}\nAnswer in a few words."
        self.prompt = engine.arrange(None, self._documents, ask, cache_salt="none").prompt
        baseline = GenerationMode.BASELINE
        full = engine.generate(self.prompt, asking.answer_tokens, baseline)
        self.answer = full.token_ids
        self._full_f1 = f1(full.output_text, question.answers)
        scored = engine.score(self.prompt, self.answer, baseline)
        self.logits, self._full_ms = scored.logits, scored.timings.total_ms

    def through(self, engine: KVBoost, kept: str) -> Asked:
        """The same question and answer for another engine on the same model."""
        other = copy(self)
        other._engine, other._kept = engine, kept
        return other

    def _cut(self, question: Question) -> list[str]:
        """Passages of at most so many tokens, each a paragraph of its own."""
        texts = [text.strip() + "\n\n" for text in question.passages[: self._asking.passages]]
        ids = [self._engine.encode(text) for text in texts]
        limit = self._asking.passage_tokens
        return [
            text if len(tokens) <= limit else self._engine.decode(tokens[: limit - 1]) + "\n\n"
            for text, tokens in zip(texts, ids, strict=True)
        ]

    def read_before(self, donor: str, salt: str) -> None:
        engine, documents = self._engine, self._documents
        exact = GenerationMode.PREFIX_CACHE
        if donor == EXACT:
            engine.generate(self.prompt, 1, exact, cache_salt=salt)
        elif donor == "alone":
            for text in documents:
                engine.warm(text, header="", cache_salt=salt)
        elif donor == "header":
            for text in documents:
                engine.warm(text, cache_salt=salt)
        elif donor == "other":
            for number, text in enumerate(documents):
                stranger = self._others[number % len(self._others)]
                after = engine.arrange(None, [stranger, text], "", cache_salt="none").prompt
                engine.warm(after, cache_salt=salt)
        else:
            order, shuffler = list(documents), random.Random(self._seed)
            while order == documents and len(set(documents)) > 1:
                shuffler.shuffle(order)
            earlier = engine.arrange(None, order, "Summarize this.", cache_salt="none").prompt
            engine.generate(earlier, 1, exact, cache_salt=salt)

    def served(self, donor: str, strategy: str, ratio: float, salt: str) -> Row:
        how: dict[str, Any] = {"cache_salt": salt, "recompute_strategy": strategy}
        how["recompute_ratio"] = ratio
        scored = self._engine.score(self.prompt, self.answer, **how)
        if donor != EXACT and not scored.reuse.count(SpanKind.MOVED):
            raise ConfigError(
                f"nothing was moved in the prompt of {self._question.question!r}; give passages "
                "of at least 64 tokens and load the model with reuse_moved='always'"
            )
        divergence = kl_divergence(self.logits, scored.logits).mean()
        agree = self.logits.argmax(-1) == scored.logits.argmax(-1)
        differs = (~agree).nonzero()
        same = not len(differs)
        stored = self._engine.chunks(ALL_CHUNKS)
        return Row(
            question=self._question.question,
            donor=donor,
            strategy=strategy,
            ratio=ratio,
            kl=max(0.0, float(divergence)),
            top1=float(agree.double().mean()),
            first_difference=None if same else int(differs[0]),
            # The same greedy text needs no second answer.
            f1=self._full_f1 if same else self._answered(how),
            full_f1=self._full_f1,
            ttft_ratio=scored.timings.total_ms / self._full_ms,
            charged_share=scored.reuse.charged_share,
            kept=self._kept,
            hit_rate=scored.reuse.kv_reuse_ratio,
            bytes_per_token=sum(one["bytes"] for one in stored)
            / sum(one["tokens"] for one in stored),
        )

    def _answered(self, how: Mapping[str, Any]) -> float:
        tokens = self._asking.answer_tokens
        result = self._engine.generate(self.prompt, tokens, keep=False, **how)
        return f1(result.output_text, self._question.answers)


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """Rows by donor, way of keeping, strategy and ratio, in the order they came."""
    groups: dict[tuple[str, str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.donor, row.kept, row.strategy, row.ratio), []).append(row)
    return [_summary(key, group) for key, group in groups.items()]


def _summary(key: tuple[str, str, str, float], rows: Sequence[Row]) -> Summary:
    def mean(name: str) -> float:
        return float(statistics.mean(getattr(row, name) for row in rows))

    differences = [row.first_difference for row in rows if row.first_difference is not None]
    return Summary(
        *key,
        count=len(rows),
        mean_kl=mean("kl"),
        median_kl=statistics.median(row.kl for row in rows),
        top1=mean("top1"),
        same_text=1 - len(differences) / len(rows),
        first_difference=statistics.median(differences) if differences else None,
        f1=mean("f1"),
        full_f1=mean("full_f1"),
        f1_difference=paired_bootstrap([row.f1 - row.full_f1 for row in rows]),
        ttft_ratio=statistics.median(row.ttft_ratio for row in rows),
        charged_share=mean("charged_share"),
        hit_rate=mean("hit_rate"),
        bytes_per_token=mean("bytes_per_token"),
    )


def pool(summaries: Sequence[Summary], donors: Sequence[str]) -> dict[tuple[str, float], float]:
    """Mean KL per strategy and ratio over several donor kinds."""
    pooled: dict[tuple[str, float], list[float]] = {}
    for one in summaries:
        if one.donor in donors:
            pooled.setdefault((one.strategy, one.ratio), []).append(one.mean_kl)
    return {key: statistics.mean(values) for key, values in pooled.items()}


def save_rows(rows: Iterable[Row], path: str | os.PathLike[str]) -> None:
    """Rows as JSON lines, to be shown again or together with others."""
    Path(path).write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def load_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    rows = []
    for path in paths:
        try:
            lines = Path(path).read_text().splitlines()
            rows += [Row(**json.loads(line)) for line in lines]
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{path} holds no rows that --save wrote: {error}") from error
    return rows


def quality_tables(summaries: Sequence[Summary]) -> Iterator[Table]:
    """A table per donor kind and way of keeping. One way of keeping fits into 80 columns."""
    many = len({one.kept for one in summaries}) > 1
    headings = ("ratio", "paid", "KL", "median", "top-1", "same", "at", "F1/full", "95 %", "TTFT")
    for donor, kept in dict.fromkeys((one.donor, one.kept) for one in summaries):
        own = [one for one in summaries if (one.donor, one.kept) == (donor, kept)]
        yield table(
            f"{donor}: {DONORS.get(donor, donor)} ({max(one.count for one in own)} questions)"
            + (f"\n{kept}, {own[0].bytes_per_token:,.0f} B/token" if many else ""),
            ("strategy",),
            (*headings, *(["hits"] if many else [])),
            [_cells(one) + ([f"{one.hit_rate:.0%}"] if many else []) for one in own],
        )


def _cells(one: Summary) -> list[str]:
    low, high = one.f1_difference
    return [
        *(one.strategy, "–" if one.strategy in RATIO_FREE else f"{one.ratio:.0%}"),
        *(f"{one.charged_share:.1%}", f"{one.mean_kl:.4f}", f"{one.median_kl:.4f}"),
        *(f"{one.top1:.0%}", f"{one.same_text:.0%}"),
        "–" if one.first_difference is None else f"{one.first_difference:.0f}",
        *(f"{one.f1:.2f}/{one.full_f1:.2f}", f"{low:+.2f}…{high:+.2f}", f"{one.ttft_ratio:.2f}"),
    ]


def quality_figure(summaries: Sequence[Summary], title: str) -> Figure:
    """Mean KL against charged percent: a panel per donor kind, a curve per strategy and way of
    keeping."""
    many = len({one.kept for one in summaries}) > 1
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in summaries:
        name = f"{one.strategy}, {one.kept}" if many else one.strategy
        curve = panels.setdefault(one.donor, {}).setdefault(name, [])
        curve.append((100 * one.charged_share, one.mean_kl if one.mean_kl > ROUNDING else 0.0))
    return draw_lines(
        panels,
        title=title,
        x="charged share of moved tokens, %",
        y="mean KL against full prefill, nats",
    )
