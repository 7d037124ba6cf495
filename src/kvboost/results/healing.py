"""The healing of approximate rows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AnswerAudit:
    """An answer over approximate rows, compared with the exact distributions at its positions."""

    compared_tokens: int
    """The number of compared tokens: of a greedy answer all, of others the first 16."""
    agreement: float
    """The share of them at which the likeliest token was the same."""
    first_divergence: int | None
    """The first token at which it was not; None if there is none."""
    mean_kl: float | None
    """KL(exact || answer's own), averaged over the first 16 tokens. The 64 tokens that the answer's
    distribution had as likeliest are told apart, the others are one outcome: so this is never
    larger than the KL over all tokens, and close to it if these 64 have most of the mass."""


@dataclass
class Healing:
    """The healing of one request's approximate rows: the engine computes them again, exactly,
    when it is idle, or on a GPU while the request answers. Changes until ``status`` is final."""

    approximate_tokens: int
    """Rows of prompt and answer that were approximate when the answer ended or became exact."""
    healed_tokens: int = 0
    """The number of them that became exact in the cache before ``status`` was final. They are the
    first ones, without gaps."""
    status: str = "waiting"
    """``"waiting"``; ``"done"``; ``"replaced"`` (the conversation went on, so that its next turn is
    healed in place of this one); ``"dropped"`` (too many waited, or something was forgotten);
    ``"failed"``."""
    audit: AnswerAudit | None = None
    """The distance of the answer from an exact one; None unless ``status`` is ``"done"``."""


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
