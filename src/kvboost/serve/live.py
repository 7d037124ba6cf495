"""The last answers, for the page: numbers, no text."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

_KEPT = 200


class LiveLog:
    """The last answers, numbered in the order in which they ended."""

    def __init__(self) -> None:
        self._answers: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.seq = 0

    def add(self, **facts: Any) -> None:
        self.seq += 1
        self._answers.append({"seq": self.seq, "at": time.time(), **facts})

    def since(self, seq: int) -> list[dict[str, Any]]:
        return [answer for answer in self._answers if answer["seq"] > seq]
