"""Documents that are kept as the mean of several readings.

The keys and values of a document depend on the text before it. The mean over several contexts
depends less on each of them than any one reading, so it is a better donor for prompts in which the
document follows yet other text. It is exact nowhere: it is kept as an approximate copy, in a branch
that no request continues, and only ever serves moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import torch

from kvboost.errors import ConfigError
from kvboost.reuse.rope import Rotation
from kvboost.runtime.generation import Generation, run_alone
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.tokens.hashing import TokenIds, as_token_ids

BRANCH = "mean"
"""In place of a repair's name: no request has it, so none continues from these rows."""
NEIGHBOURS = 2
"""Documents before the one that is read."""
NEIGHBOUR_TOKENS = 256
"""The most tokens of each."""

MakeState = Callable[[TokenIds], RequestState]
"""The request that reads some ids exactly and answers nothing."""


class Reading(Generation):
    """Reads a prompt exactly and keeps nothing."""

    def rows(self) -> torch.Tensor:
        """``[2, layers, kv_heads, prompt, head_dim]``."""
        end = len(self._request.token_ids)
        with self._lend_kv():
            run_alone(self._runtime.model.forward, self._prompt_logits())
            return self._kv.reading(end)(0, end).clone()


def neighbours_of(number: int, num_documents: int, contexts: int) -> list[list[int]]:
    """Which documents are before document ``number`` in each of its readings."""
    others = [other for other in range(num_documents) if other != number]
    drawn = Random(number)
    return [drawn.sample(others, NEIGHBOURS) for _ in range(contexts)]


def mean_of(
    readings: Sequence[tuple[torch.Tensor, int]], rotation: Rotation, position: int
) -> torch.Tensor:
    """The mean of rows, ``[2, layers, kv_heads, rows, head_dim]``, each with the position where
    they begin; its keys are rotated to ``position``."""
    mean = torch.zeros_like(readings[0][0], dtype=torch.float32)
    for rows, start in readings:
        mean[0] += rotation.rotate_to(rows[0].float(), start, back=True)
        mean[1] += rows[1]
    mean /= len(readings)
    mean[0] = rotation.rotate_to(mean[0], position)
    return mean.to(readings[0][0].dtype)


class Means:
    """Reads ``documents`` after ``header`` and others of them, and keeps the means."""

    def __init__(
        self,
        runtime: Runtime,
        header: TokenIds,
        documents: Sequence[TokenIds],
        contexts: int,
        make_state: MakeState,
    ) -> None:
        if len(documents) <= NEIGHBOURS:
            raise ConfigError(
                f"contexts={contexts} reads a document after {NEIGHBOURS} others, and there are "
                f"{len(documents)}; give at least {NEIGHBOURS + 1}, or leave contexts out"
            )
        if runtime.no_means:
            raise ConfigError(f"contexts={contexts} cannot be used: {runtime.no_means}")
        if runtime.rotation is None:
            raise ConfigError(
                f"contexts={contexts} needs rotary positions, which this model does not have; "
                "leave contexts out"
            )
        self._runtime, self._rotation = runtime, runtime.rotation
        self._header, self._documents = header, documents
        self._contexts, self._make_state = contexts, make_state

    def read(self, number: int) -> int:
        """Reads one document in all its contexts; returns the number of new chunks."""
        document, epoch = self._documents[number], self._runtime.store.epoch
        readings: list[tuple[torch.Tensor, int]] = []
        for neighbours in neighbours_of(number, len(self._documents), self._contexts):
            before = [self._documents[other][:NEIGHBOUR_TOKENS] for other in neighbours]
            ids = as_token_ids(np.concatenate([self._header, *before, document]))
            state = self._make_state(ids)
            if self._runtime.planner.reusable(state.request) < len(ids):
                raise ConfigError(
                    f"a reading of {len(ids):,} tokens is longer than this model can move; give "
                    "shorter documents, or leave contexts out"
                )
            rows = Reading(self._runtime, state).rows()
            start = len(ids) - len(document)
            readings.append((rows[:, :, :, start:], start))
        known = rows[:, :, :, : len(self._header)]
        mean = mean_of(readings, self._rotation, len(self._header))
        return self._keep(number, torch.cat([known, mean], dim=3), epoch)

    def _keep(self, number: int, rows: torch.Tensor, epoch: int) -> int:
        runtime = self._runtime
        ids = as_token_ids(np.concatenate([self._header, self._documents[number]]))
        with runtime.pool.lend(len(ids)) as kv:
            kv.reserve(len(ids))
            with kv.filling(0, len(ids)) as own:
                own.copy_(rows)
            return runtime.store.admit(
                runtime.root_of(self._make_state(ids).request),
                ids,
                runtime.packer.packing(kv, len(ids)),
                exact_rows=0,
                repair=BRANCH,
                epoch=epoch,
            )
