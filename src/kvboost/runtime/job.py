"""One request as the loop and its scheduler see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from kvboost.config import GenerationMode
from kvboost.results import SpanKind
from kvboost.runtime.request import RequestState
from kvboost.runtime.streams import AnswerListener
from kvboost.tokens.hashing import ChunkKey, TokenIds, common_prefix, window_hashes

if TYPE_CHECKING:
    from kvboost.model.execution.segment import Segment
    from kvboost.runtime.computing import Steps

WINDOW = 32
SAMPLED = 16
"""One window in this many is compared with the windows of other prompts."""


@dataclass(eq=False)
class Job:
    """A request that waits or runs."""

    state: RequestState
    root: ChunkKey
    """The root of the cache it uses. Jobs with other roots share nothing with it."""
    listener: AnswerListener
    arrived: float = 0.0
    deadline: float | None = None
    started: float | None = None
    held_since: float | None = None
    """Since when it waits for another job to read text that both need."""
    steps: Steps | None = None
    need: Segment | None = None
    """The rows it needs next; None if it paused or has not started."""
    num_shown: int = 0
    """How many pieces of text, or token ids, its listener has got."""
    cancelled: bool = False
    runs_alone: bool = False
    """Its batch failed, and its rows could not simply be run again with others."""

    @property
    def tenant(self) -> str:
        return self.state.request.tenant

    @property
    def mode(self) -> GenerationMode:
        return self.state.request.mode

    @property
    def token_ids(self) -> TokenIds:
        return self.state.request.token_ids

    @property
    def is_reading(self) -> bool:
        """Whether it has no token of its answer yet."""
        return not self.state.token_ids

    @property
    def is_probing(self) -> bool:
        """Whether its next rows are a probe."""
        return self.need is not None and self.need.observes

    @property
    def awaits_device(self) -> bool:
        """Whether it pauses, and the device has not done yet what it needs to go on."""
        return self.state.awaits is not None and not self.state.awaits()

    @property
    def to_read(self) -> list[range]:
        """The rows of its prompt that must be computed; all of them until it has been planned."""
        if not self.state.reuse.spans:
            return [range(len(self.token_ids))]
        spans = self.state.reuse.spans
        return [range(s.start, s.end) for s in spans if s.kind is SpanKind.COMPUTE]

    @property
    def left_to_read(self) -> list[range]:
        """The part of ``to_read`` that is not computed yet."""
        done = self.state.rows
        left = (range(max(rows.start, done), rows.stop) for rows in self.to_read)
        return [rows for rows in left if rows]

    @property
    def rows_left(self) -> int:
        return sum(map(len, self.left_to_read))

    def common_with(self, other: Job) -> tuple[int, list[int]]:
        """How many tokens both prompts begin with, and at which places after them the other one has
        windows of this one."""
        found = self._common.get(other)
        if found is None:
            begin, theirs = common_prefix(self.token_ids, other.token_ids), other.windows
            places = (theirs[hash] for hash in theirs.keys() & self.windows.keys())
            found = self._common[other] = begin, [place for place in places if place >= begin]
        return found

    @cached_property
    def _common(self) -> WeakKeyDictionary[Job, tuple[int, list[int]]]:
        return WeakKeyDictionary()

    @cached_property
    def windows(self) -> dict[int, int]:
        """A sample of its prompt's windows and their positions. The sample depends on content
        alone, so equal texts give equal windows."""
        hashes = window_hashes(self.root, self.token_ids, WINDOW)
        places = np.flatnonzero(hashes % np.uint64(SAMPLED) == 0)
        return dict(zip(hashes[places].tolist(), places.tolist(), strict=True))
