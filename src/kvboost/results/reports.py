"""The results of other calls: scores, orders of documents, pins, healing, checks, adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvboost.results.reuse import ReuseReport
from kvboost.results.timings import Timings

LONGEST_ADAPTER_NAME = 256


def kl_divergence(expected: Any, actual: Any) -> Any:
    """KL(expected || actual) of every row of logits, two tensors, in float64: ``[rows]``."""
    log_p, log_q = (logits.cpu().double().log_softmax(-1) for logits in (expected, actual))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Score:
    """The result of ``score``. ``logits`` is a tensor ``[continuation, vocab]``."""

    logits: Any
    timings: Timings
    reuse: ReuseReport


@dataclass(frozen=True)
class Arrangement:
    """The result of ``arrange``."""

    prompt: list[int]
    """Token ids for ``generate``."""
    order: tuple[int, ...]
    """The order of the documents: the first is ``documents[order[0]]``."""
    exact_tokens: int
    """The number of the prompt's tokens that an exact hit is expected to cover."""
    exact_tokens_as_given: int
    """The same for the documents in the order given."""

    @property
    def saved_tokens(self) -> int:
        """The number of tokens that the exact hit covers more than in the order given."""
        return self.exact_tokens - self.exact_tokens_as_given


@dataclass(frozen=True)
class Pin:
    """A text whose KV is not evicted."""

    name: str
    tokens: int
    """The first tokens of the text: all of them, unless only a part was cached."""
    chunks: int
    bytes: int
    """Of its chunks, also of those that other pins hold as well."""
    ttl: float | None
    """Seconds until it ends; None: it ends with :meth:`KVBoost.unpin` or the engine."""


@dataclass(frozen=True)
class HealReport:
    """The result of ``heal``."""

    conversations: int
    """The number of conversations that were healed to their end."""
    tokens: int
    """The number of rows that became exact."""
    waiting: int
    """The number of conversations and documents that are left."""
    readings: int = 0
    """The number of documents that were read after other text (``warm_later``)."""


@dataclass(frozen=True)
class CalibrationStep:
    """A ratio that was tried, its mean KL to a full prefill, and repair cost per moved row."""

    ratio: float
    mean_kl: float
    charged_share: float


@dataclass(frozen=True)
class Calibration:
    """The result of ``calibrate``: the smallest ratio tried that holds ``max_kl``."""

    ratio: float
    max_kl: float
    steps: tuple[CalibrationStep, ...]

    @property
    def holds(self) -> bool:
        """False if even recomputing everything exceeds ``max_kl``. 16-bit rounding can do that."""
        return self.steps[-1].mean_kl <= self.max_kl


@dataclass(frozen=True)
class VerificationReport:
    """The result of ``verify_correctness``. Truthy only if hits happened and answers agreed."""

    prompts: int
    reused_share: float
    """Share of the prompt tokens that came from the cache."""
    max_logit_delta: float
    mean_kl: float
    tokens_equal: bool
    tolerance_logit: float
    tolerance_kl: float
    problems: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str
    path: str
    digest: str
    """Identifies its weights and settings. Cached text is kept apart by it, not by the name."""
    rank: int
    """The largest of its ranks."""
    num_modules: int
    """The number of linear layers that it changes."""
    num_bytes: int
    is_activated: bool
    """Whether it applies from its invocation tokens on (aLoRA)."""
