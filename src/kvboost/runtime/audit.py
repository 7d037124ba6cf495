"""How far answers over approximate rows were from exact ones. Healing computes the exact logits of
every position of an answer anyway; here they are compared with what the answer was drawn from."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvboost.results import AnswerAudit

RECORDED_TOKENS = 16
"""Of so many tokens at the beginning of an answer the distribution is kept. Later tokens build on
the first ones."""
TOLD_APART = 64
"""So many tokens of a distribution are kept; the others count as one."""
ALARM_ANSWERS = 8
_LEAST_SHARE = 1e-9


@dataclass(frozen=True)
class TopTokens:
    """The likeliest tokens of a distribution, the likeliest first, and their log probabilities.
    Where the logits were, until they are compared: the next token does not wait for a copy."""

    ids: torch.Tensor
    logprobs: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor) -> TopTokens:
        """Of the model's own distribution, given its logits ``[vocab]``."""
        # What the others have is what these leave of one: 32 bits would round it away.
        logprobs, ids = logits.double().log_softmax(-1).topk(min(TOLD_APART, len(logits)))
        return cls(ids.to(torch.int32), logprobs)

    def on_host(self) -> TopTokens:
        return TopTokens(self.ids.cpu(), self.logprobs.cpu())

    def kl_from(self, exact: torch.Tensor) -> float:
        """KL(exact || this), with all tokens but these as one outcome; ``exact`` are logits
        ``[vocab]``. Never larger than the KL over all tokens."""
        here = self.on_host()
        logits = exact.double()
        ids = here.ids.to(logits.device).long()
        expected = (logits[ids] - logits.logsumexp(-1)).cpu()
        actual = here.logprobs
        shares = expected.exp()
        rest = [max(_LEAST_SHARE, 1.0 - float(one.exp().sum())) for one in (expected, actual)]
        outcomes = torch.tensor(rest, dtype=torch.float64).log()
        told_apart = float((shares * (expected - actual)).sum())
        return max(0.0, told_apart + rest[0] * float(outcomes[0] - outcomes[1]))


class AnswerComparison:
    """Compares one answer, token by token, as its exact logits come."""

    def __init__(self, recorded: Sequence[TopTokens], greedy_ids: Sequence[int]) -> None:
        """``recorded``: the distributions of the first tokens. ``greedy_ids``: the answer, if each
        of its tokens was the likeliest one; else nothing."""
        self._recorded = recorded
        self._greedy_ids = greedy_ids
        self._agreed: list[bool] = []
        self._kl: list[float] = []

    def __len__(self) -> int:
        """How many tokens there are to compare."""
        return max(len(self._recorded), len(self._greedy_ids))

    @cached_property
    def _likeliest(self) -> list[int]:
        """The likeliest token at each position. The request that was recorded does not wait for a
        device to tell it."""
        first = [int(top.ids[0]) for top in self._recorded]
        return [*first, *self._greedy_ids[len(first) :]]

    @property
    def num_done(self) -> int:
        return len(self._agreed)

    def add(self, logits: torch.Tensor) -> None:
        """The exact logits of the next positions, ``[positions, vocab]``."""
        wanted = logits[: len(self) - self.num_done]
        for row, token in zip(wanted, wanted.argmax(-1).tolist(), strict=True):
            number = self.num_done
            if number < len(self._recorded):
                self._kl.append(self._recorded[number].kl_from(row))
            self._agreed.append(token == self._likeliest[number])

    def result(self) -> AnswerAudit | None:
        """None if there was nothing to compare."""
        if not self._agreed:
            return None
        return AnswerAudit(
            compared_tokens=len(self._agreed),
            agreement=sum(self._agreed) / len(self._agreed),
            first_divergence=self._agreed.index(False) if not all(self._agreed) else None,
            mean_kl=sum(self._kl) / len(self._kl) if self._kl else None,
        )


class AuditTotals:
    """All answers that were compared. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._total_kl = 0.0
        self._max_kl: float | None = None
        self._recent: deque[float] = deque(maxlen=ALARM_ANSWERS)
        self._lock = threading.Lock()

    def add(self, audit: AnswerAudit, *, counts_for_alarm: bool) -> None:
        with self._lock:
            self._counts["answers"] += 1
            self._counts["tokens"] += audit.compared_tokens
            self._counts["agreed"] += round(audit.agreement * audit.compared_tokens)
            self._counts["same"] += audit.first_divergence is None
            self._counts["same_first"] += audit.first_divergence != 0
            if audit.mean_kl is not None:
                self._counts["measured"] += 1
                self._total_kl += audit.mean_kl
                self._max_kl = max(self._max_kl or 0.0, audit.mean_kl)
                if counts_for_alarm:
                    self._recent.append(audit.mean_kl)

    def take_alarm(self, max_kl: float) -> float | None:
        """The mean KL of the last answers if it is above ``max_kl``, and then begins anew; None
        otherwise, or if there were too few."""
        with self._lock:
            if len(self._recent) < ALARM_ANSWERS:
                return None
            mean = sum(self._recent) / len(self._recent)
            if mean <= max_kl:
                return None
            self._recent.clear()
            return mean

    def stats(self) -> dict[str, Any]:
        with self._lock:
            counts = Counter(self._counts)
            answers, tokens, measured = counts["answers"], counts["tokens"], counts["measured"]
            return {
                "audited": answers,
                "compared_tokens": tokens,
                "mean_kl": self._total_kl / measured if measured else None,
                "max_kl": self._max_kl,
                "token_agreement": counts["agreed"] / tokens if tokens else None,
                "first_token_agreement": counts["same_first"] / answers if answers else None,
                "same_answers": counts["same"] / answers if answers else None,
            }
