"""What requests ask to be kept: ``cache_control`` and ``prompt_cache_retention``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvboost.serve.request_fields import Body

Retention = Literal["in_memory", "in-memory", "24h"]
"""OpenAI's words. Its clients have had both spellings of the first one."""


class CacheControl(Body):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None

    @property
    def seconds(self) -> int:
        return 3600 if self.ttl == "1h" else 300


class Marked(Body):
    """What may be marked as the end of a beginning to keep."""

    cache_control: CacheControl | None = None


class Mark(NamedTuple):
    """The beginning of a conversation that is to be kept: its tools, and so many chat messages."""

    num_messages: int
    seconds: int


def marks_of(ends: Iterable[tuple[int, CacheControl | None]]) -> list[Mark]:
    """The marks among ``ends``, each after so many messages; of those with the same lifetime, the
    last."""
    found = sorted(Mark(number, mark.seconds) for number, mark in ends if mark is not None)
    return list({mark.seconds: mark for mark in found}.values())
