"""A model of how soon chunks are used again (return rates), learned while serving.

A chunk's rate is a product: the usual rate at its age (the time since its last use), times a factor
for each of its kinds. That is Cox's proportional hazards model over bins. It is fitted to probes,
chunks that were watched: for each bin and kind, returns seen over returns expected. A probe that
has not returned yet counts with the time it was watched, so the fit waits for nothing.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Cells = tuple[int | None, ...]
"""The kind of a chunk in each respect; None if it is unknown."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[Any]

NUM_CELLS = 64
UNKNOWN = NUM_CELLS - 1

FIRST_BIN = 16
BINS_PER_DOUBLING = 4
NUM_BINS = 22 * BINS_PER_DOUBLING
EDGES = FIRST_BIN * (2.0 ** (np.arange(NUM_BINS + 1) / BINS_PER_DOUBLING) - 1)
WIDTHS = np.diff(EDGES)
BIN_ENDS = [*EDGES[1:-1].tolist(), math.inf]

LEVELS_PER_DOUBLING = 4
MAX_LEVEL = 12 * LEVELS_PER_DOUBLING

WINDOW = 16_384
"""The model learns from this many of the newest probes."""
FIRST_FIT = 64
FIT_SHARE = 1 / 16
"""A fit is due when this share of the probes is new, and late when a quarter more are."""
LATE = 1.25
SWEEPS = 3
PRIOR = 4.0
"""Returns that must be seen before a kind's own rate counts as much as the usual one."""

TRUST, DOUBT = 3.0, 1.0
"""Standard errors by which the model must be better than recency to be trusted, and to stay so."""
FADE = 0.97
"""The weight of a judgement one fit later."""
RIVALS = 512


@lru_cache(maxsize=4096)
def log_bin(count: int, per_doubling: float) -> int:
    """0 for 0, then ``per_doubling`` bins for each doubling of ``count + 1``."""
    return min(UNKNOWN - 1, int(per_doubling * math.log2(count + 1)))


class ReturnModel:
    """Watches probes, learns from them from time to time, and estimates the value of chunks.

    A fit takes milliseconds, so it is made on a copy (:meth:`to_fit`), in any thread; :meth:`adopt`
    takes over what it found.

    The probes of one request (``probes_together``) mostly return together, so they count as one
    observation in the test of whether an advantage is chance.
    """

    def __init__(self, probes_together: int) -> None:
        self.fits = 0
        self.is_trusted = False
        self._together = probes_together
        self._watched = 0
        self._new_cells: list[list[int]] = []
        """Of the newest probes, from which the model has not learned yet."""
        self._cells: Ints = np.zeros((0, WINDOW), dtype=np.intp)
        self._start = np.zeros(WINDOW)
        self._end = np.zeros(WINDOW)
        self._is_open = np.zeros(WINDOW, dtype=bool)
        self._returned = np.zeros(WINDOW, dtype=bool)
        self._factors: Floats = np.ones((0, NUM_CELLS))
        self._log_factors: list[list[float]] = []
        self._usual = 0.0
        self._worth: list[list[float]] = []
        self._foreseen: tuple[Ints, Floats] = (np.zeros(0, dtype=np.int64), np.zeros(0))
        self._advantage = 0.0
        self._variance = 0.0

    def watch(self, cells: Cells, start: int) -> int:
        """Watches a chunk of these kinds, last used at ``start``; returns the probe's number."""
        slot = self._watched % WINDOW
        self._start[slot] = start
        self._is_open[slot], self._returned[slot] = True, False
        self._watched += 1
        self._new_cells.append([UNKNOWN if cell is None else cell for cell in cells])
        return self._watched - 1

    def is_due(self, *, late: bool = False) -> bool:
        """Whether the model should be fitted; with ``late``, whether it should have been long
        since."""
        enough = max(FIRST_FIT, FIT_SHARE * min(self._watched, WINDOW))
        return len(self._new_cells) >= (LATE * enough if late else enough)

    def to_fit(self) -> ReturnModel:
        """A copy for :meth:`fit`. Probes that are watched later wait for the next one."""
        self._take_new_cells()
        model = copy.copy(self)
        for name in ("_cells", "_start", "_end", "_is_open", "_returned", "_factors"):
            setattr(model, name, getattr(self, name).copy())
        return model

    def fit(self, now: int) -> None:
        """Learns from what is known ``now``."""
        self._judge()
        self._fit(now)

    def adopt(self, fitted: ReturnModel) -> None:
        """Takes over what a copy has learned."""
        self.fits, self.is_trusted = fitted.fits, fitted.is_trusted
        self._factors, self._log_factors = fitted._factors, fitted._log_factors
        self._usual, self._worth = fitted._usual, fitted._worth
        self._foreseen = fitted._foreseen
        self._advantage, self._variance = fitted._advantage, fitted._variance

    def used(self, probe: int, now: int) -> None:
        """The chunk was used again."""
        self._close(probe, now, returned=True)

    def lost(self, probe: int, now: int) -> None:
        """The chunk is no longer watched. Negative numbers are not probes and are ignored."""
        if probe >= 0:
            self._close(probe, now, returned=False)

    def quickness(self, cells: Cells, first: int = 0) -> float:
        """The rate at which chunks of these kinds return, relative to usual, as a logarithm. The
        values of the first respects and of those from number ``first`` on add up."""
        quickness = 0.0 if first else -self._usual
        for row, cell in zip(self._log_factors[first:], cells, strict=False):
            quickness += row[UNKNOWN if cell is None else cell]
        return quickness

    def worth(self, quickness: float, age: int) -> float:
        """The returns to expect per unit of time that a chunk is kept, if it is kept for the best
        time. The model must have been fitted."""
        level = max(-MAX_LEVEL, min(MAX_LEVEL, round(quickness)))
        return self._worth[level + MAX_LEVEL][bisect_right(BIN_ENDS, age)]

    def _close(self, probe: int, now: int, *, returned: bool) -> None:
        slot = probe % WINDOW
        if probe >= self._watched - WINDOW:  # else another has its place
            self._end[slot] = now
            self._is_open[slot], self._returned[slot] = False, returned

    def _take_new_cells(self) -> None:
        new, self._new_cells = self._new_cells, []
        if not len(self._cells):
            self._cells = np.zeros((len(new[0]), WINDOW), dtype=np.intp)
            self._factors = np.ones((len(new[0]), NUM_CELLS))
        self._cells[:, np.arange(self._watched - len(new), self._watched) % WINDOW] = np.array(
            new
        ).T

    def _fit(self, now: int) -> None:
        count = min(self._watched, WINDOW)
        cells = self._cells[:, :count]
        is_open = self._is_open[:count]
        ages = np.maximum(0.0, np.where(is_open, now, self._end[:count]) - self._start[:count])
        bins = np.minimum(np.searchsorted(EDGES, ages, side="right") - 1, NUM_BINS - 1)
        in_last_bin = ages - EDGES[bins]
        returned = self._returned[:count]
        returns = np.bincount(bins[returned], minlength=NUM_BINS)
        returns_of = [np.bincount(row[returned], minlength=NUM_CELLS) for row in cells]

        factor = self._factor(cells)
        for _ in range(SWEEPS):
            beyond = np.cumsum(_sums(bins, factor, NUM_BINS)[::-1])[::-1]
            last = _sums(bins, factor * in_last_bin, NUM_BINS)
            rates = _usual_rates(returns, np.append(beyond[1:], 0.0) * WIDTHS + last)
            until = np.concatenate([[0.0], np.cumsum(rates * WIDTHS)])
            expected = until[bins] + rates[bins] * in_last_bin
            for row, factors, seen in zip(cells, self._factors, returns_of, strict=True):
                others = factor / factors[row]
                factors[:] = _factors(seen, _sums(row, expected * others, NUM_CELLS))
                factor = others * factors[row]

        self.fits += 1
        self._log_factors = (LEVELS_PER_DOUBLING * np.log2(self._factors)).tolist()
        # Only the product of rates and factors means something; levels are around what is usual.
        quickness = LEVELS_PER_DOUBLING * np.log2(factor)
        self._usual = float(quickness.mean())
        worth = _worth_table(rates * 2 ** (self._usual / LEVELS_PER_DOUBLING))
        self._worth = worth.tolist()
        (open_slots,) = np.nonzero(is_open)
        levels = np.rint(quickness[open_slots] - self._usual).astype(np.int64)
        levels = np.clip(levels, -MAX_LEVEL, MAX_LEVEL) + MAX_LEVEL
        first = self._watched - count
        numbers = first + (open_slots - first) % WINDOW
        self._foreseen = (numbers, worth[levels, bins[open_slots]])

    def _factor(self, cells: Ints) -> Floats:
        factor = np.ones(cells.shape[1])
        for row, factors in zip(cells, self._factors, strict=True):
            factor *= factors[row]
        return factor

    def _judge(self) -> None:
        """Some of the probes that were open at the last fit have returned since. Did the model rank
        them above the others where recency did not, or the reverse?"""
        numbers, worth = self._foreseen
        is_here = numbers >= self._watched - WINDOW
        numbers, worth = numbers[is_here], worth[is_here]
        slots = numbers % WINDOW
        start, returned = self._start[slots], self._returned[slots]
        (others,) = np.nonzero(self._is_open[slots])
        others = others[:: max(1, len(others) // RIVALS)]
        self._advantage *= FADE
        self._variance *= FADE
        if returned.any() and len(others):
            older = np.sign(start[others] - start[returned, None])
            better = np.sign(worth[returned, None] - worth[others])
            gains = np.where(older == better, better, 0.0).mean(axis=1)
            self._advantage += gains.sum()
            self._variance += self._together * (gains**2).sum()
        errors = self._advantage / math.sqrt(self._variance + 1.0)
        self.is_trusted = errors > (DOUBT if self.is_trusted else TRUST)


def _sums(cells: Ints, weights: Floats, num_cells: int) -> Floats:
    return np.bincount(cells, weights, num_cells).astype(np.float64, copy=False)


def _usual_rates(returns: Ints, exposure: Floats) -> Floats:
    """Returns per unit of time at every age. With little data, the rate of the previous bin
    continues, falling as one over the age, which alone gives the order of the last use."""
    rates = []
    expected = 1.0 / float(WIDTHS[0])
    for seen, time in zip(returns.tolist(), exposure.tolist(), strict=True):
        rates.append((PRIOR + seen) / (PRIOR / expected + time))
        expected = rates[-1] / 2 ** (1 / BINS_PER_DOUBLING)
    return np.array(rates)


def _factors(seen: Ints, expected: Floats) -> Floats:
    """Returns seen over returns expected, per cell. With little data, as in the cells beside."""
    beside_seen, beside_expected = np.zeros(NUM_CELLS), np.zeros(NUM_CELLS)
    for beside, values in ((beside_seen, seen[:UNKNOWN]), (beside_expected, expected[:UNKNOWN])):
        beside[1:UNKNOWN] += values[:-1]
        beside[: UNKNOWN - 1] += values[1:]
    prior = PRIOR * (PRIOR + beside_seen) / (PRIOR + beside_expected)
    return (prior + seen) / (PRIOR + expected)


def _worth_table(rates: Floats) -> Floats:
    """``[2 * MAX_LEVEL + 1, NUM_BINS]``: the value of chunks of each level at each age.

    If kept until the end of some later bin, a chunk returns with some probability and stays for
    some time; the best ratio of the two over all ends counts (Gittins' index). So a chunk that is
    expected back later is not judged by the present alone.
    """
    levels = np.arange(-MAX_LEVEL, MAX_LEVEL + 1) / LEVELS_PER_DOUBLING
    rises = np.flatnonzero(np.diff(rates) > 0)  # after the last, no later end is better
    rates = rates * 2.0 ** levels[:, None]
    hazard = rates * WIDTHS
    returned = np.exp(hazard - np.cumsum(hazard, axis=1)) * -np.expm1(-hazard)  # within each bin
    stayed = returned / rates
    worth = rates.copy()  # until the end of the bin it is in; further ends follow
    for start in range(rises[-1] + 1 if len(rises) else 0):
        returns = np.cumsum(returned[:, start:], axis=1)
        time = np.cumsum(stayed[:, start:], axis=1) + 1e-300  # none where all returned long before
        np.maximum(worth[:, start], (returns / time).max(axis=1), out=worth[:, start])
    return worth
