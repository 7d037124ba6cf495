"""What one request did, for the access log and for traces."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random

from kvboost.serve.choices import Choice
from kvboost.serve.reuse_report import counts


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
            if choice.index % choice.call.n == 0:
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


def begin() -> RequestRecord:
    """A record for the request of this task and of the tasks that it starts."""
    record = RequestRecord()
    _current.set(record)
    return record


def current() -> RequestRecord:
    """The record of this task's request."""
    return _current.get() or RequestRecord()
