"""The last answers, for the page: numbers, no text."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict
from typing import Any

from kvboost.results import Healing, SpanKind
from kvboost.serve.answers.choices import Choice

_KEPT = 200
KEPT_HEALING = 16
"""Of so many answers it shows what becomes of their approximate rows."""


class LiveLog:
    """The last answers, numbered in the order in which they ended."""

    def __init__(self) -> None:
        self._answers: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._healing: deque[tuple[str, Healing]] = deque(maxlen=KEPT_HEALING)
        self._open: dict[Choice, str] = {}
        self.seq = 0

    def begin(self, choice: Choice, request_id: str) -> None:
        self._open[choice] = request_id

    def end(self, choice: Choice) -> None:
        self._open.pop(choice, None)

    def reading(self) -> list[dict[str, Any]]:
        """How far running answers without a first token are with their prompts."""
        found = []
        for choice, request_id in self._open.items():
            reuse = choice.result.reuse
            if choice.stream.num_tokens or not reuse.spans:  # it answers, or it waits in the queue
                continue
            found.append(
                {
                    "request_id": request_id,
                    "prompt_tokens": len(choice.prompt_ids),
                    "known_tokens": reuse.cached_tokens,
                    "moved_tokens": reuse.count(SpanKind.MOVED),
                    "read_tokens": choice.stream.num_rows,
                }
            )
        return found

    def add(self, healing: Healing | None = None, *, request_id: str, **facts: Any) -> None:
        """``healing``: what becomes of the approximate rows; it changes while they are healed."""
        self.seq += 1
        self._answers.append(
            {"seq": self.seq, "at": time.time(), "request_id": request_id, **facts}
        )
        if healing is not None:
            self._healing.append((request_id, healing))

    def since(self, seq: int) -> list[dict[str, Any]]:
        return [answer for answer in self._answers if answer["seq"] > seq]

    def healed(self) -> list[dict[str, Any]]:
        """The healing of the last 16 answers that had approximate rows."""
        return [
            {"request_id": request_id, **asdict(healing)} for request_id, healing in self._healing
        ]
