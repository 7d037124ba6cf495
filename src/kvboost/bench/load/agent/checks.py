"""An answer over moved text against that of a full prefill: its first token and its action."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvboost.bench.load.serve.clients import Answer

ANSWER_TOKENS = 64
LOGPROBS = 20
"""The most that our server tells."""
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)|```.*?(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Check:
    """One turn."""

    kind: str
    line: int
    """Where the trace has the request."""
    moved_tokens: int
    """Rows that were reused and not computed again, though they were read at another place."""
    full_reused_tokens: int
    """Rows that the full prefill reused: 0, or it was none."""
    kl: float
    same_action: bool
    same_text: bool

    @classmethod
    def of(cls, kind: str, line: int, full: Answer, reused: Answer) -> Check:
        rows = full.rows
        return cls(
            kind,
            line,
            reused.moved_tokens,
            sum(rows.values()) - rows["computed"],
            divergence(full.first_logprobs, reused.first_logprobs),
            action(full.text) == action(reused.text),
            full.text == reused.text,
        )


def action(text: str) -> str:
    """The first tool call or fenced block of an answer, cut off or not; a JSON object if the
    answer begins with one; else its first line."""
    text = text.strip()
    if text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return text  # it is cut off
        return text[:end]
    found = _CALL.search(text)
    return found.group() if found else text.partition("\n")[0].strip()


def divergence(full: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The KL divergence of ``other`` from ``full``, log probabilities by token. Tokens that only
    one of them has count as one, with all that neither has: the true KL is at least this."""
    shared = full.keys() & other.keys()
    p, q = ([math.exp(one[name]) for name in sorted(shared)] for one in (full, other))
    pairs = [*zip(p, q, strict=True), (1 - sum(p), 1 - sum(q))]
    least = 1e-9  # what rounding may leave of the rest
    return max(0.0, sum(a * math.log(a / max(b, least)) for a, b in pairs if a > least))
