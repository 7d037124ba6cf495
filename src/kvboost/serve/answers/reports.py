"""The reports on answers: the ``kvboost`` object, the access log, and traces."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvboost.results import ReuseReport, SpanKind
from kvboost.serve.answers.choices import Choice
from kvboost.tokens.hashing import TokenIds

Decode = Callable[[Sequence[int]], str]


def counts(reuse: ReuseReport) -> dict[str, int]:
    """Rows by source. ``moved_tokens`` includes ``recomputed_tokens``."""
    return {
        "exact_tokens": reuse.count(SpanKind.EXACT),
        "approximate_tokens": reuse.count(SpanKind.APPROXIMATE),
        "moved_tokens": reuse.count(SpanKind.MOVED),
        "recomputed_tokens": len(reuse.recomputed),
        "computed_tokens": reuse.count(SpanKind.COMPUTE),
    }


def spans(
    reuse: ReuseReport, prompt_ids: TokenIds, decode: Decode | None = None
) -> list[dict[str, Any]]:
    """The spans of a prompt, with their text if ``decode`` is given."""
    shown = []
    recomputed = reuse.recomputed
    for span in reuse.spans:
        again = 0
        if span.kind is SpanKind.MOVED:
            again = bisect_left(recomputed, span.end) - bisect_left(recomputed, span.start)
        one = {
            "kind": span.kind.value,
            "start": span.start,
            "end": span.end,
            "tokens": span.num_tokens,
            "recomputed": again,
            "donor": span.donor,
            "tier": span.tier,
            "resemblance": span.resemblance,
        }
        if decode is not None:
            one["text"] = decode(prompt_ids[span.start : span.end].tolist())
        shown.append(one)
    return shown


@dataclass
class RequestRecord:
    """The answers of one request, in the order in which they ended."""

    choices: list[Choice] = field(default_factory=list)

    @property
    def ttft_ms(self) -> float | None:
        """Milliseconds from the complete request to the first token of any answer."""
        times = [choice.ttft_ms for choice in self.choices if choice.result.token_ids]
        return min(times, default=None)

    def tokens(self) -> dict[str, int]:
        """Tokens by source; ``cached`` are those that were not computed. A prompt counts once,
        whatever its number of answers."""
        total = dict.fromkeys(("prompt", "cached", "exact", "approximate", "moved", "computed"), 0)
        total |= {"recomputed": 0, "generated": 0}
        for choice in self.choices:
            total["generated"] += len(choice.result.token_ids)
            if choice.is_first:
                total["prompt"] += len(choice.prompt_ids)
                total["cached"] += choice.result.cached_tokens
                for name, count in counts(choice.result.reuse).items():
                    total[name.removesuffix("_tokens")] += count
        return total

    def line(self) -> str:
        """The answers as fields of the access log; empty if there were none."""
        if not self.choices:
            return ""
        fields = [f"{name}={count}" for name, count in self.tokens().items()]
        ttft = self.ttft_ms
        fields += ["ttft_ms=-" if ttft is None else f"ttft_ms={ttft:.0f}"]
        reasons = sorted({choice.result.finish_reason for choice in self.choices})
        return " ".join([*fields, f"finish={','.join(reasons)}"])


def new_id() -> str:
    """A name that no other request has, for logs and clients; not a secret. The system's random
    numbers would cost a call during which other threads take the interpreter."""
    return f"{_random.getrandbits(128):032x}"


_random = Random()
_current: ContextVar[RequestRecord | None] = ContextVar("kvboost_request", default=None)


def begin_record() -> RequestRecord:
    """A record for the request of this task and of the tasks that it starts."""
    record = RequestRecord()
    _current.set(record)
    return record


def current_record() -> RequestRecord:
    """The record of this task's request."""
    return _current.get() or RequestRecord()
