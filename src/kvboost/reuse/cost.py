"""The cost of a forward, learned from the forwards that run. Reuse is chosen where it pays.

A forward of ``rows`` rows over ``keys`` keys takes about ``fixed + rows * (row + key * keys)``.
The three coefficients depend on model, machine and device: on a GPU, launches take most of a short
forward; on a CPU, rows do. Until forwards have been measured, the model's arithmetic is used.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvboost.config import RepairParams
from kvboost.reuse.plan import Plan
from kvboost.reuse.repair import PROBE_BAND, mean_error, needed_share, probe_rows
from kvboost.reuse.step_times import FIXED_ROWS, StepTimes, size_of

WORTHWHILE_RATIO = 0.9
"""Moved text is reused if that is expected to take less than this share of computing it."""
_LEAST_SPREAD = 8
"""The largest forward seen must have this many times the rows of the smallest, or the fixed cost
cannot be told from the cost per row."""
_MEMORY = 64.0
"""Older forwards fade: about this many count."""


class Weighed(NamedTuple):
    """The expected costs of two ways to serve a prompt: in seconds if ``is_measured``, otherwise
    in rows."""

    moving: float
    computing: float
    is_measured: bool

    @property
    def pays(self) -> bool:
        return self.moving < WORTHWHILE_RATIO * self.computing


def unpadded(rows: int) -> int:
    """Forwards compute the rows that they are asked for."""
    return rows


class CostModel:
    """Thread-safe. ``attention_share`` is the arithmetic of attending to one key, relative to one
    row through the weights. ``path``, if given, is a file that keeps the costs between
    processes."""

    def __init__(self, attention_share: float, path: Path | None = None) -> None:
        self._prior = np.array([FIXED_ROWS, 1.0, attention_share])
        self._path = path
        self._lock = threading.Lock()
        self._gram = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._rows = [float("inf"), 0.0]
        self._place = [0.0, 0.0]
        self._slow_place = [0.0, 0.0]
        self._steps = StepTimes()
        self._solved: np.ndarray | None = None
        self.computed_rows: Callable[[int], int] = unpadded
        """The number of rows that are computed for so many: on a GPU, forwards are padded to a few
        sizes."""
        self.plain_rows: Callable[[int], int] = size_of
        """The number of rows that a decode step without drafts counts as."""
        self.drafted_rows: Callable[[int], int] = size_of
        """The number that one with drafts counts as: on a GPU it is padded, too, and takes longer
        than a step of as many requests."""
        self._load()

    def observe(self, rows: int, keys: int, seconds: float) -> None:
        """Learns that a forward took ``seconds``. Errors count relative to its duration."""
        if rows < 1 or seconds <= 0:
            return
        rows = self.computed_rows(rows)
        features = _features(rows, keys) / seconds
        with self._lock:
            fade = 1 - 1 / _MEMORY
            self._gram = self._gram * fade + np.outer(features, features)
            self._target = self._target * fade + features
            self._rows = [min(self._rows[0], rows), max(self._rows[1], rows)]
            self._solved = None

    def observe_place(self, rows: int, seconds: float, *, slow: bool = False) -> None:
        """Learns that copying ``rows`` cached rows into place took ``seconds``; ``slow`` ones had
        to be read first. Each is learned by itself: rows that a folder gives once would otherwise
        make all moved text seem slow, and what is not moved is not measured again."""
        with self._lock:
            place = self._slow_place if slow else self._place
            place[:] = [place[0] * 0.9 + rows, place[1] * 0.9 + seconds]

    @property
    def is_measured(self) -> bool:
        return self._rows[1] >= _LEAST_SPREAD * self._rows[0]

    def forward(self, rows: int, keys: int) -> float:
        """The expected cost of a forward: in seconds once measured, until then in rows."""
        with self._lock:
            fixed, row, key = self._coefficients().tolist()
        computed = self.computed_rows(rows)
        return float(fixed + computed * (row + key * keys))

    def rows_within(self, seconds: float, keys: int) -> int | None:
        """The number of rows that a forward over ``keys`` keys computes in ``seconds``; None until
        forwards have been measured."""
        if not self.is_measured:
            return None
        with self._lock:
            fixed, row, key = map(float, self._coefficients())
        return max(0, int((seconds - fixed) / max(row + key * keys, 1e-12)))

    def observe_step(self, rows: int, seconds: float, *, drafted: bool = False) -> None:
        """Learns that a decode step of ``rows`` rows took ``seconds``. Few rows do not cost what
        the line through long forwards says: they wait for the weights, or take another kernel."""
        with self._lock:
            self._steps.observe(self._size(rows, drafted), seconds)

    def step(self, rows: int, keys: int, *, drafted: bool = False) -> float:
        """The expected time of a decode step of ``rows`` rows. Comparable with other steps only:
        the unit is a row until a step has been measured."""

        def forward(rows: int) -> float:
            fixed, row, key = map(float, self._coefficients())
            return fixed + self.computed_rows(rows) * (row + key * keys)

        with self._lock:
            return self._steps.time(self._size(rows, drafted), forward)

    def _size(self, rows: int, drafted: bool) -> int:
        return self.drafted_rows(rows) if drafted else self.plain_rows(rows)

    def place(self, rows: int, *, slow: bool = False) -> float:
        """The expected time to copy ``rows`` cached rows into place; 0 if it is not known."""
        with self._lock:
            seen, seconds = self._slow_place if slow else self._place
            return rows * seconds / seen if seen and self.is_measured else 0.0

    def moving_pays(
        self,
        plan: Plan,
        repair: RepairParams,
        *,
        more_seconds: float = 0.0,
    ) -> bool:
        """Whether reusing the moved runs of ``plan`` should be faster than computing them."""
        weighed = self.weigh(plan, repair, more_seconds=more_seconds)
        return weighed is None or weighed.pays

    def weigh(
        self,
        plan: Plan,
        repair: RepairParams,
        *,
        more_seconds: float = 0.0,
    ) -> Weighed | None:
        """The expected cost of reusing the moved runs of ``plan``: a probe, copies, a sparse
        forward and ``more_seconds``; and what a plain forward would. None for a ``repair`` that
        does not ask."""
        if not plan.moved or repair.strategy != "auto" or repair.reuse_moved == "always":
            return None
        total = plan.num_tokens
        known = plan.in_place[-1].end if plan.in_place else plan.num_shared
        plain = self.forward(total - known, (known + total) // 2)
        unknown = sum(len(rows) for rows in plan.computed())
        recomputed = round(repair.ratio * needed_share(mean_error(plan.moved)) * plan.num_moved)
        moving = self.forward(unknown + recomputed, total)
        moving += self.forward(min(unknown, probe_rows(plan.moved)), total) * PROBE_BAND[1]
        slow = sum(hit.num_tokens for run in plan.moved for hit in run.hits if hit.is_slow)
        moving += self.place(plan.num_moved + plan.num_shared - slow) + self.place(slow, slow=True)
        if self.is_measured:  # else costs are not in seconds
            moving += more_seconds
        return Weighed(moving, plain, self.is_measured)

    def save(self) -> None:
        """Writes what was learned, if there is anything. A folder that cannot be written is
        ignored: the costs are learned again."""
        if self._path is None or not self.is_measured:
            return
        learned = {
            "gram": self._gram.tolist(),
            "target": self._target.tolist(),
            "rows": self._rows,
            "place": self._place,
            "slow_place": self._slow_place,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, delete=False, suffix=".tmp"
            ) as file:
                json.dump(learned, file)
            os.replace(file.name, self._path)
        except OSError:
            return

    def _load(self) -> None:
        try:
            learned = json.loads(self._path.read_text()) if self._path else None
            if learned:
                gram, target = np.array(learned["gram"]), np.array(learned["target"])
                rows, place = map(float, learned["rows"]), map(float, learned["place"])
                slow = list(map(float, learned["slow_place"]))
                if gram.shape == (3, 3) and target.shape == (3,):
                    self._gram, self._target = gram, target
                    self._rows, self._place, self._slow_place = list(rows), list(place), slow
        except (OSError, ValueError, TypeError, KeyError):
            return  # damaged, or written by another version: the costs are learned again

    def _coefficients(self) -> np.ndarray:
        """Relative least squares with a weak pull towards the prior; never negative."""
        if not self.is_measured:
            return self._prior
        if self._solved is None:
            self._solved = self._solve()
        return self._solved

    def _solve(self) -> np.ndarray:
        scale = self._target[1] / max(self._gram[1] @ self._prior, 1e-30)
        prior = self._prior * scale
        pull = np.diag(1e-3 * np.diag(self._gram))
        solved = np.linalg.solve(self._gram + pull, self._target + pull @ prior)
        return np.clip(solved, 0.0, None)


def _features(rows: int, keys: int) -> np.ndarray:
    return np.array([1.0, rows, float(rows) * keys])
