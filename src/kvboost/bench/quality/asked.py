"""A question whose answer with full prefill is known, served from text that was read before."""

from __future__ import annotations

import random
from copy import copy
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvboost import ConfigError, GenerationMode, GenerationResult, KVBoost, SpanKind
from kvboost.bench.kit.stats import f1
from kvboost.bench.quality.rows import DEFAULT_KEPT, EXACT, LongAnswer, Row
from kvboost.bench.quality.tasks import Asking, LongQuestion
from kvboost.bench.texts.prompts import fragments, num_shared
from kvboost.bench.texts.questions import Question
from kvboost.config import CONTROL, MOST_CONTEXTS
from kvboost.results import ReuseReport, kl_divergence

if TYPE_CHECKING:
    import torch

ASKED_BEFORE = "Summarize this."
EDITED_LINE = "It is 12:31 on Tuesday; branch main, 3 files changed.\n\n"
MOST_BYTES = 1 << 30
"""Of a GPU's memory, for a request's rows and for the cache each: processes may share it."""
ALL_CHUNKS = 1_000_000


@dataclass(frozen=True)
class Cell:
    """The repair of moved text."""

    strategy: str
    ratio: float


@dataclass(frozen=True)
class Comparison:
    """Distributions over the same answer, compared token by token."""

    kl_by_token: tuple[float, ...]
    top1: float
    first_difference: int | None

    @classmethod
    def of(cls, expected: torch.Tensor, actual: torch.Tensor) -> Comparison:
        divergences = kl_divergence(expected, actual).clamp(min=0.0)
        agree = expected.argmax(-1).cpu() == actual.argmax(-1).cpu()
        differs = (~agree).nonzero()
        return cls(
            tuple(divergences.tolist()),
            float(agree.double().mean()),
            int(differs[0]) if len(differs) else None,
        )

    @property
    def kl(self) -> float:
        return sum(self.kl_by_token) / len(self.kl_by_token)


@dataclass(frozen=True)
class PayloadCost:
    """The cost of the passages of one prompt, in KVShareArena's measures. A layer-token is one
    token in one layer."""

    recomputed_layer_tokens: int
    """Repair with its probes, and rows of passages that were not in the cache."""
    dense_layer_tokens: int
    """A full prefill of the passages."""
    kv_bytes: int
    """The KV of the passages, as the cache holds it."""
    bytes_per_token: float


def payload_cost(engine: KVBoost, reuse: ReuseReport, start: int, end: int) -> PayloadCost:
    """The cost of a prompt whose rows ``[start, end)`` are passages."""
    layers, stored = engine.facts()["layers"], engine.chunks(ALL_CHUNKS)
    new = sum(
        max(0, min(span.end, end) - max(span.start, start))
        for span in reuse.spans
        if span.kind is SpanKind.COMPUTE
    )
    tokens = sum(one["tokens"] for one in stored)
    row_bytes = sum(one["bytes"] for one in stored) / max(1, tokens)
    return PayloadCost(
        recomputed_layer_tokens=round(layers * (reuse.charged_tokens + new)),
        dense_layer_tokens=layers * (end - start),
        kv_bytes=round(row_bytes * (end - start)),
        bytes_per_token=row_bytes,
    )


class Asked:
    """A question whose full answer is known."""

    def __init__(
        self, engine: KVBoost, question: Question, other: Question, asking: Asking, seed: int
    ) -> None:
        self._engine = engine
        self._kept = DEFAULT_KEPT
        self._question = question
        self._seed = seed
        self._asking = asking
        self._documents = self._cut(question)
        self._others = self._cut(other)
        begun = fragments(engine.encode)(question.begun) if question.begun else []
        arranged = engine.arrange(None, self._documents, question.ask, cache_salt="none")
        self.prompt = [*arranged.prompt, *begun]
        start = num_shared(self._before(["a"]), self._before(["b"]))
        lengths = (len(engine.encode(one, add_special_tokens=False)) for one in self._documents)
        self._payload = (start, start + sum(lengths))
        baseline = GenerationMode.BASELINE
        tokens = asking.longest_answer
        self._full = engine.generate(self.prompt, tokens, baseline)
        self._full_checked = self._checked(self._full)
        self.answer = self._full.token_ids
        scored = engine.score(self.prompt, self.answer, baseline)
        self.logits, self._full_ms = scored.logits, scored.timings.total_ms
        bare = [*engine.arrange(None, [question.ask], "", cache_salt="none").prompt, *begun]
        self._guessed = engine.generate(bare, tokens, baseline)
        without = engine.score(bare, self.answer, baseline).logits
        self._no_context_kl = Comparison.of(self.logits, without).kl

    @property
    def task(self) -> str:
        return self._asking.task

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
                self._read_after(self._others[number % len(self._others)], text, salt)
        elif donor == "contexts":
            for number, text in enumerate(documents):
                engine.warm(text, cache_salt=salt)
                for other in range(MOST_CONTEXTS - 1):
                    self._read_after(self._others[(number + other) % len(self._others)], text, salt)
        elif donor == "idle":
            engine.warm(documents, cache_salt=salt, progress=False)
            waiting = engine.warm_later(documents, cache_salt=salt)
            if (read := engine.heal().readings) < waiting:
                raise ConfigError(
                    f"only {read} of {waiting} further readings fitted half of the cache; give it "
                    "more memory (max_cache_bytes) or use fewer passages"
                )
        elif donor in ("session", "healed"):
            for turn in range(1, len(documents) + 1):
                line = EDITED_LINE.replace("12:31", f"12:{30 + turn}")
                engine.generate(self._before([line, *documents[:turn]]), 1, cache_salt=salt)
                if donor == "healed":
                    engine.heal()
        else:
            engine.generate(self._edited(donor), 1, exact, cache_salt=salt)

    def _edited(self, donor: str) -> list[int]:
        """An earlier prompt, of which this one is an edit."""
        documents, others = self._documents, self._others
        before = {
            "edit": [EDITED_LINE, *documents],
            "cleared": [
                *documents[: len(documents) // 2],
                others[0],
                *documents[len(documents) // 2 :],
            ],
            "dropped": [*others[:2], *documents],
            "tools": [documents[1], documents[0], *documents[2:]],
            "added": [documents[0], *documents[2:]],
            "compacted": [*others[:4], *documents[1:]],
        }
        if donor not in before:
            return self._shuffled(self._seed)
        return self._before(before[donor])

    def _before(self, documents: list[str]) -> list[int]:
        """An earlier prompt with these documents."""
        return self._engine.arrange(None, documents, ASKED_BEFORE, cache_salt="none").prompt

    def _read_after(self, other: str, text: str, salt: str) -> None:
        """Reads ``text`` after the header and another document."""
        after = self._engine.arrange(None, [other, text], "", cache_salt="none").prompt
        self._engine.warm(after, cache_salt=salt)

    def _shuffled(self, seed: int) -> list[int]:
        """A prompt with the same passages in another order."""
        order, shuffler = list(self._documents), random.Random(seed)
        while order == self._documents and len(set(order)) > 1:
            shuffler.shuffle(order)
        return self._before(order)

    def served(self, donor: str, cell: Cell, salt: str, paid: float | None = None) -> Row:
        """``paid``: what ``auto`` has paid per moved row, for a control with the same budget."""
        is_control = cell.strategy == CONTROL and paid is not None
        how: dict[str, Any] = {
            "cache_salt": salt,
            "recompute_strategy": cell.strategy,
            "recompute_ratio": min(1.0, paid or 0.0) if is_control else cell.ratio,
        }
        scored = self._engine.score(self.prompt, self.answer, **how)
        if donor != EXACT and not scored.reuse.count(SpanKind.MOVED):
            raise ConfigError(
                f"nothing was moved in the prompt of {self._question.question!r}; give passages "
                "of at least 64 tokens and load the model with reuse_moved='always'"
            )
        cost = payload_cost(self._engine, scored.reuse, *self._payload)
        return self.row(
            self._engine,
            Comparison.of(self.logits, scored.logits),
            how,
            donor=donor,
            strategy=cell.strategy,
            ratio=cell.ratio,
            ttft_ratio=scored.timings.total_ms / self._full_ms,
            ttft_ms=scored.timings.total_ms,
            charged_share=scored.reuse.charged_share,
            charged_flops=scored.reuse.charged_flops,
            hit_rate=scored.reuse.kv_reuse_ratio,
            **asdict(cost),
        )

    def row(
        self, engine: KVBoost, compared: Comparison, how: dict[str, Any], **figures: Any
    ) -> Row:
        """The comparison, and how good the answer is that ``engine`` gives. The same greedy text
        needs no second answer."""
        answer = self._full
        if compared.first_difference is not None:
            answer = engine.generate(self.prompt, self._asking.longest_answer, keep=False, **how)
        return Row(
            question=self._question.question,
            kl=compared.kl,
            kl_by_token=compared.kl_by_token,
            top1=compared.top1,
            first_difference=compared.first_difference,
            f1=self._f1(answer),
            full_f1=self._f1(self._full),
            no_context_f1=self._f1(self._guessed),
            no_context_kl=self._no_context_kl,
            kept=self._kept,
            long=self._long(answer),
            **figures,
        )

    def _f1(self, answer: GenerationResult) -> float | None:
        answers = self._question.answers
        return f1(answer.output_text, answers) if answers else None

    def _long(self, answer: GenerationResult) -> LongAnswer | None:
        question, full = self._question, self._full
        if not isinstance(question, LongQuestion):
            return None
        parses, passes = self._full_checked if answer is full else self._checked(answer)
        full_parses, full_passes = self._full_checked
        return LongAnswer(
            self.task,
            question.likeness(answer.output_text, full.output_text),
            question.likeness(self._guessed.output_text, full.output_text),
            parses,
            full_parses,
            passes,
            full_passes,
        )

    def _checked(self, answer: GenerationResult) -> tuple[bool | None, bool | None]:
        """Whether the code in an answer parses, and whether it is right."""
        if not isinstance(self._question, LongQuestion):
            return None, None
        is_whole = answer.finish_reason != "length"
        return self._question.check(answer.output_text, is_whole=is_whole)
