"""The reports of the last answers, to be explained when someone asks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kvboost.results import Explanation, ReuseReport, SpanKind
from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown

MAX_ANSWERS = 64
"""Answers that are kept for one key."""
MAX_BYTES = 16 * 1024**2
"""Memory that they take, about."""
_SPAN_BYTES = 300
_TOKEN_BYTES = 8  # and of a row that was computed again
_MIN_NAMED = 16
"""Characters of a part that tell which document it is from."""


@dataclass(frozen=True)
class Answered:
    """An answer that can be explained."""

    id: str
    created: float
    reports: tuple[ReuseReport, ...]
    """One for each prompt."""
    num_bytes: int


class Explanations:
    """The last answers of each owner. For one event loop."""

    def __init__(self) -> None:
        self._by_owner: dict[str, OrderedDict[str, Answered]] = {}

    def keep(self, owner: str, answer_id: str, reports: Iterable[ReuseReport]) -> None:
        """Notes an answer; the oldest ones of this owner make room for it."""
        own = self._by_owner.setdefault(owner, OrderedDict())
        kept = tuple(reports)
        own[answer_id] = Answered(answer_id, time.time(), kept, sum(map(_size, kept)))
        size = sum(one.num_bytes for one in own.values())
        while len(own) > MAX_ANSWERS or (size > MAX_BYTES and len(own) > 1):
            _, oldest = own.popitem(last=False)
            size -= oldest.num_bytes

    def get(self, owner: str, answer_id: str) -> Answered:
        """Raises ApiError 404 if this owner has no such answer."""
        own = self._by_owner.get(owner)
        found = None if own is None else own.get(answer_id)
        if found is None:
            said = f"there is no answer {shown(answer_id)} of this key; the last {MAX_ANSWERS} that"
            said += " have ended can be explained, by the id that they have"
            raise ApiError(404, said, "answer_not_found", "answer_id")
        return found

    def all(self, owner: str) -> list[Answered]:
        """The answers of an owner, the oldest first."""
        return [*self._by_owner.get(owner, OrderedDict()).values()]

    def clear(self) -> None:
        """Forgets all of them: their prompts may hold text that must be forgotten."""
        self._by_owner.clear()

    def keep_only(self, owners: Collection[str]) -> None:
        """Forgets the answers of all others."""
        for owner in self._by_owner.keys() - set(owners):
            del self._by_owner[owner]


def _size(report: ReuseReport) -> int:
    rows = report.prompt_tokens + len(report.recomputed)
    return rows * _TOKEN_BYTES + len(report.spans) * _SPAN_BYTES


def with_documents(explanation: Explanation, documents: Sequence[tuple[str, str]]) -> Explanation:
    """``explanation`` with the names of the ``documents`` (name and text) that hold its parts."""

    def document(text: str) -> str | None:
        for piece in text.split(" … "):
            wanted = piece.strip()[: 4 * _MIN_NAMED]
            if len(wanted) >= _MIN_NAMED:
                for name, content in documents:
                    if wanted in content:
                        return name
        return None

    parts = [
        one if one.kind is SpanKind.COMPUTE else replace(one, document=document(one.text))
        for one in explanation.parts
    ]
    return replace(explanation, parts=tuple(parts))
