"""An answer over moved text against that of a full prefill: its first token and its action."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvboost.bench.serve.clients import Answer

ANSWER_TOKENS = 64
LOGPROBS = 20
"""The most that our server tells."""
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_CALL = re.compile(
    r"<tool_call>(?P<call>.*?)(?P<call_end></tool_call>|\Z)"
    r"|```(?P<language>[^\n]*\n?)(?P<block>.*?)(?P<block_end>```|\Z)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Check:
    """One turn."""

    kind: str
    line: int
    """Where the trace has the request."""
    moved_tokens: int
    """Rows that were reused and not computed again, though they were read at another place, or
    follow such rows."""
    full_reused_tokens: int
    """Rows that the full prefill reused: 0, or it was none."""
    kl: float
    same_action: bool | None
    """None if there is no action to compare within the tokens of an answer."""
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
            same_action(action(full.text), action(reused.text)),
            full.text == reused.text,
        )


@dataclass(frozen=True)
class Action:
    """A tool call, a fenced block or a JSON object."""

    text: str
    is_whole: bool
    """It was not cut off."""


def action(text: str) -> Action | None:
    """The first of an answer, outside of its reasoning. None if there is none: an agent does
    nothing in what was answered so far."""
    text = _THOUGHT.sub("", text).strip()
    if text.startswith("{"):
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except ValueError:
            return Action(text, False)
        return Action(text[:end], True)
    found = _CALL.search(text)
    if found is None:
        return None
    kind = "call" if found["call"] is not None else "block"
    return Action(found[kind].strip(), bool(found[f"{kind}_end"]))


def same_action(one: Action | None, other: Action | None) -> bool | None:
    """Whether two actions are the same, as far as both go: text before one of them may have left
    it fewer tokens. None if neither answer has one, or one was cut off before it says anything."""
    if one is None or other is None:
        return None if one is other else False
    if one.is_whole and other.is_whole:
        return one.text == other.text
    if not (one.text and other.text):
        return None
    # What was cut off is the beginning of something.
    is_start = one.text.startswith(other.text) and not other.is_whole
    return is_start or (other.text.startswith(one.text) and not one.is_whole)


def divergence(full: Mapping[str, float], other: Mapping[str, float]) -> float:
    """The KL divergence of ``other`` from ``full``, log probabilities by token. Tokens that only
    one of them has count as one, with all that neither has: the true KL is at least this."""
    shared = full.keys() & other.keys()
    p, q = ([math.exp(one[name]) for name in sorted(shared)] for one in (full, other))
    pairs = [*zip(p, q, strict=True), (1 - sum(p), 1 - sum(q))]
    least = 1e-9  # what rounding may leave of the rest
    return max(0.0, sum(a * math.log(a / max(b, least)) for a, b in pairs if a > least))
