"""What reuse of moved text gives up: passages read before, in new prompts, against full prefill.

Each question's passages stand in a prompt behind the chat template's header. They were read
before in one of several ways, the donor kinds; a strategy then serves the prompt, and what it
makes of the full model's own answer is compared with what the full model makes of it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path

from kvboost import ConfigError, GenerationMode, KVBoost, SpanKind
from kvboost.bench.questions import Question, make_questions
from kvboost.bench.stats import f1, paired_bootstrap
from kvboost.results import kl_divergence

DONORS = {
    "alone": "each passage read by itself",
    "header": "each passage read behind the chat template's header",
    "other": "each passage read behind the header and a passage of another question",
    "reordered": "all passages read in one earlier request, in another order",
}
RATIO_FREE = ("none", "selective")
"""Strategies that no ratio changes: they run once."""


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
    """The share of the answer's tokens that stays the likeliest."""
    first_difference: int | None
    """The first token that does not; None if the greedy answer is the same text."""
    f1: float
    full_f1: float
    ttft_ratio: float
    """Time until the answer's logits were there, as a share of full prefill's."""
    charged_share: float


@dataclass(frozen=True)
class Summary:
    """All rows of a strategy, a ratio and a donor kind."""

    donor: str
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


@dataclass(frozen=True)
class Setting:
    """How questions are asked."""

    passages: int = 8
    passage_tokens: int = 256
    answer_tokens: int = 16


def measure(
    engine: KVBoost,
    questions: Sequence[Question],
    strategies: Sequence[str],
    ratios: Sequence[float],
    donors: Sequence[str],
    setting: Setting,
    on_cell: Callable[[], None] = lambda: None,
) -> Iterator[Row]:
    """Every question with every donor kind, strategy and ratio. Questions with fewer passages
    than the setting asks for use those they have. The first runs of a process are slower than
    later ones; nothing is timed before one has been answered."""
    cells = list(cells_of(strategies, ratios))
    for number, question in enumerate(questions):
        other = questions[(number + 1) % len(questions)]
        if other is question:
            other = make_questions(1, seed=1)[0]
        asked = Asked(engine, question, other, setting, seed=number)
        for donor in donors:
            salt = f"quality-{donor}"
            asked.read_before(donor, salt)
            for strategy, ratio in cells:
                yield asked.served(donor, strategy, ratio, salt)
                on_cell()
            engine.forget_salt(salt)


def cells_of(strategies: Sequence[str], ratios: Sequence[float]) -> Iterator[tuple[str, float]]:
    for strategy in strategies:
        yield from ((strategy, ratio) for ratio in ((0.0,) if strategy in RATIO_FREE else ratios))


class Asked:
    """A question whose full answer is known."""

    def __init__(
        self, engine: KVBoost, question: Question, other: Question, setting: Setting, seed: int
    ) -> None:
        self._engine = engine
        self._question = question
        self._seed = seed
        self._setting = setting
        self._documents = self._cut(question)
        self._others = self._cut(other)
        ask = f"Question: {question.question}\nAnswer in a few words."
        self.prompt = engine.arrange(None, self._documents, ask, cache_salt="none").prompt
        baseline = GenerationMode.BASELINE
        full = engine.generate(self.prompt, setting.answer_tokens, baseline)
        self.answer = full.token_ids
        self._full_f1 = f1(full.output_text, question.answers)
        scored = engine.score(self.prompt, self.answer, baseline)
        self.logits, self._full_ms = scored.logits, scored.timings.total_ms

    def through(self, engine: KVBoost) -> Asked:
        """The same question and answer for another engine on the same model."""
        other = copy(self)
        other._engine = engine
        return other

    def _cut(self, question: Question) -> list[str]:
        """Passages of at most so many tokens, each a paragraph of its own."""
        texts = [text.strip() + "\n\n" for text in question.passages[: self._setting.passages]]
        ids = [self._engine.encode(text) for text in texts]
        limit = self._setting.passage_tokens
        return [
            text if len(tokens) <= limit else self._engine.decode(tokens[: limit - 1]) + "\n\n"
            for text, tokens in zip(texts, ids, strict=True)
        ]

    def read_before(self, donor: str, salt: str) -> None:
        engine, documents = self._engine, self._documents
        if donor == "alone":
            for text in documents:
                engine.warm(text, header="", cache_salt=salt)
        elif donor == "header":
            for text in documents:
                engine.warm(text, cache_salt=salt)
        elif donor == "other":
            for number, text in enumerate(documents):
                stranger = self._others[number % len(self._others)]
                behind = engine.arrange(None, [stranger, text], "", cache_salt="none").prompt
                engine.warm(behind, cache_salt=salt)
        else:
            order, shuffler = list(documents), random.Random(self._seed)
            while order == documents and len(set(documents)) > 1:
                shuffler.shuffle(order)
            earlier = engine.arrange(None, order, "Summarize this.", cache_salt="none").prompt
            engine.generate(earlier, 1, GenerationMode.PREFIX_CACHE, cache_salt=salt)

    def served(self, donor: str, strategy: str, ratio: float, salt: str) -> Row:
        scored = self._engine.score(
            self.prompt,
            self.answer,
            cache_salt=salt,
            recompute_strategy=strategy,
            recompute_ratio=ratio,
        )
        if not scored.reuse.count(SpanKind.MOVED):
            raise ConfigError(
                f"nothing was moved in the prompt of {self._question.question!r}; give passages "
                "of at least 64 tokens and load the model with reuse_moved='always'"
            )
        divergence = kl_divergence(self.logits, scored.logits).mean()
        agree = self.logits.argmax(-1) == scored.logits.argmax(-1)
        differs = (~agree).nonzero()
        same = not len(differs)
        return Row(
            question=self._question.question,
            donor=donor,
            strategy=strategy,
            ratio=ratio,
            kl=max(0.0, float(divergence)),
            top1=float(agree.double().mean()),
            first_difference=None if same else int(differs[0]),
            # The same greedy text needs no second answer.
            f1=self._full_f1 if same else self._answered(strategy, ratio, salt),
            full_f1=self._full_f1,
            ttft_ratio=scored.timings.total_ms / self._full_ms,
            charged_share=scored.reuse.charged_share,
        )

    def _answered(self, strategy: str, ratio: float, salt: str) -> float:
        result = self._engine.generate(
            self.prompt,
            self._setting.answer_tokens,
            cache_salt=salt,
            recompute_strategy=strategy,
            recompute_ratio=ratio,
            keep=False,
        )
        return f1(result.output_text, self._question.answers)


def noise_floor(
    engine: KVBoost, other: KVBoost, questions: Sequence[Question], setting: Setting
) -> dict[str, float]:
    """How far the same model lies from itself in another dtype, both prefilled in full."""
    divergences, same = [], 0
    for number, question in enumerate(questions):
        asked = Asked(engine, question, question, setting, seed=number)
        scored = other.score(asked.prompt, asked.answer, GenerationMode.BASELINE)
        divergences.append(float(kl_divergence(asked.logits, scored.logits).mean()))
        same += bool((asked.logits.argmax(-1) == scored.logits.argmax(-1)).all())
    return {
        "mean_kl": statistics.mean(divergences),
        "median_kl": statistics.median(divergences),
        "same_text": same / len(questions),
    }


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """Rows by donor, strategy and ratio, in the order they came."""
    groups: dict[tuple[str, str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.donor, row.strategy, row.ratio), []).append(row)
    return [_summary(key, group) for key, group in groups.items()]


def pool(summaries: Sequence[Summary], donors: Sequence[str]) -> dict[tuple[str, float], float]:
    """Mean KL per strategy and ratio over several donor kinds."""
    pooled: dict[tuple[str, float], list[float]] = {}
    for one in summaries:
        if one.donor in donors:
            pooled.setdefault((one.strategy, one.ratio), []).append(one.mean_kl)
    return {key: statistics.mean(values) for key, values in pooled.items()}


def _summary(key: tuple[str, str, float], rows: Sequence[Row]) -> Summary:
    donor, strategy, ratio = key
    differences = [row.first_difference for row in rows if row.first_difference is not None]
    return Summary(
        donor=donor,
        strategy=strategy,
        ratio=ratio,
        count=len(rows),
        mean_kl=statistics.mean(row.kl for row in rows),
        median_kl=statistics.median(row.kl for row in rows),
        top1=statistics.mean(row.top1 for row in rows),
        same_text=1 - len(differences) / len(rows),
        first_difference=statistics.median(differences) if differences else None,
        f1=statistics.mean(row.f1 for row in rows),
        full_f1=statistics.mean(row.full_f1 for row in rows),
        f1_difference=paired_bootstrap([row.f1 - row.full_f1 for row in rows]),
        ttft_ratio=statistics.median(row.ttft_ratio for row in rows),
        charged_share=statistics.mean(row.charged_share for row in rows),
    )


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
