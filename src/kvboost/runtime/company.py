"""What a request is told about the others of its loop."""

from __future__ import annotations

from collections.abc import Iterable

from kvboost.runtime.job import Job


class Company:
    """What requests need and expect together. A request is taken out while it is asked what it
    needs next, so that it is told of the others; adding all of them up each time would take as long
    as a step where many run."""

    def __init__(self, jobs: Iterable[Job], *, shares_forwards: bool = True) -> None:
        """``shares_forwards``: whether prompts that are read are in one forward with answers."""
        self.num_answering = 0
        self._shares_forwards = shares_forwards
        self._tokens = self._promises = 0.0
        self._rows = 0
        for job in jobs:
            self._count(job, 1)

    def add(self, job: Job) -> None:
        self._count(job, 1)

    def take(self, job: Job) -> None:
        """Takes a request out and tells it of the others."""
        self._count(job, -1)
        state = job.state
        state.other_tokens, state.other_promises = self._tokens, self._promises
        state.other_rows = self._rows

    def _count(self, job: Job, sign: int) -> None:
        state = job.state
        if state.token_ids:
            self.num_answering += sign
            self._tokens += sign * state.expected_tokens
            self._promises += sign * state.promised_tokens
        elif not self._shares_forwards:
            return
        if job.need is not None:
            self._rows += sign * len(job.need)
