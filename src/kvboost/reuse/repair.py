"""Repair strategies: which moved rows to recompute.

A strategy scores the moved rows, perhaps with a probe through a few layers of the model, and
chooses rows to recompute. Those and all new rows then go through one packed forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from kvboost.cache.lookup.hits import MovedRun
from kvboost.config import OVERLAP, RepairParams
from kvboost.model.execution.segment import Hook
from kvboost.reuse.plan import Plan
from kvboost.reuse.probe import AttentionMass, Bands, Deviation, Probe
from kvboost.reuse.shift import Floats, Positions, Spans, Which

PROBE_ROWS, LEAST_PROBE_ROWS = 64, 16
"""At most this many of a prompt's last rows are probed for what they attend to, and at least this
many of them where little has changed: there it matters less which rows are chosen."""
PROBE_SLICE = 4096
"""Rows that go through a probe together: the masks of more would take too much memory."""
PROBE_BAND = (0.64, 0.86)
"""The probe observes attention between these depths: there a model finds what it will say."""
EARLY_LAYER = 0.2
"""It also observes the layer at this depth. Some models send much attention to a few rows there,
say those of articles, which mean nothing later on. If these rows are stale, all others suffer."""
EARLY_SHARE = 0.15
"""The share of attention in the early layer in a row's score."""
PARTIAL_LAYER = 0.25
"""The cost of a probe's last layer: its projections run, its attention and MLP do not."""
TYPICAL_SHARE = 0.32
"""``auto`` recomputes ``ratio`` of the moved rows if this share of the last row's attention goes to
them, and more or fewer in proportion: the KL grows with that share."""
LEAST_BUDGET, MOST_BUDGET = 0.5, 2.0
"""The factor by which ``auto`` may depart from ``ratio`` for that."""
LEAST_ERROR, SEAM_ERROR, SEAM_REACH = 0.02, 0.15, 3.5
"""The error of a moved row's values, relative to their size: after the same text but for a little;
and at the first row of a run, which has a new neighbour, fading over so many rows."""
CHANGED_ERROR, NEAR, FADING = 0.42, 9.0, 0.34
"""It grows with the share of the text before a row that is another. Most of that text is directly
before the run, and matters less to rows further on: (1 + rows / ``NEAR``) to the power of minus
``FADING`` times as much. All of this was measured over eight kinds of edits."""
TYPICAL_ERROR, ERROR_POWER = 0.16, 2.0
"""If the rows that the question attends to are expected to be this far off or farther, ``auto``
recomputes what ``ratio`` says. With smaller errors it takes fewer rows, by this power of them: the
KL grows with their square, so that what is left stays small."""
SEAM_ROWS = 2
SHIFT_TOKENS = 256
"""The most rows of a span of the shift; a longer run is split into several."""


def probed_layers(num_layers: int) -> Bands:
    """The layers in which a probe observes attention."""
    early = round(EARLY_LAYER * num_layers)
    low, high = (round(depth * num_layers) for depth in PROBE_BAND)
    return Bands(range(early, early + 1), range(min(low, high - 1), high))


def needed_share(error: float) -> float:
    """Which share of the usual rows ``auto`` recomputes if moved rows have this ``error``."""
    return math.pow(min(1.0, error / TYPICAL_ERROR), ERROR_POWER)


def mean_error(runs: Sequence[MovedRun]) -> float:
    """About the mean of ``MovedText.errors`` over the rows of ``runs``. They fall steeply at first:
    most of the rows that are looked at are among the first of a run."""
    facts = [(run.end - run.start, run.rows_changed, run.rows_before) for run in runs]
    rows, changed, before = np.array(facts, np.float32).T[..., None]
    errors = _errors(rows * _SAMPLED**2, changed, before)
    return float((rows * errors * _SAMPLED).sum() / (rows.sum() * _SAMPLED.sum()))


def _errors(since: Floats, rows_changed: Floats | float, rows_before: Floats | int) -> Floats:
    """The expected errors of rows that are ``since`` rows after the first of their runs."""
    changed = rows_changed / (rows_before + since) * (1 + since / NEAR) ** -FADING
    errors: Floats = SEAM_ERROR * np.exp(-since / SEAM_REACH) + CHANGED_ERROR * changed
    return errors + np.float32(LEAST_ERROR)


_SAMPLED = ((np.arange(32) + 0.5) / 32).astype(np.float32)
"""Of each run, rows at the squares of these shares of its length."""


def probe_rows(runs: Sequence[MovedRun]) -> int:
    """The number of a prompt's last rows that are probed before ``runs`` are repaired."""
    return max(LEAST_PROBE_ROWS, math.ceil(PROBE_ROWS * needed_share(mean_error(runs))))


class RepairStep(NamedTuple):
    """Rows of the prompt at ``positions``, increasing and on the host, to be computed, with a
    ``shift`` of others. Or they run up to layer ``until`` only, for what ``probe`` sees. They
    ``may_go_on`` if all of them will be computed after it. Rows that are ``absent`` are not
    attended to."""

    positions: torch.Tensor
    shift: Hook | None = None
    probe: Probe | None = None
    until: int | None = None
    absent: torch.Tensor | None = None
    may_go_on: bool = False

    @property
    def is_complete(self) -> Callable[[], bool] | None:
        """Whether the probe has seen all, if a GPU may still be at it."""
        return None if self.probe is None else self.probe.is_complete


@dataclass(frozen=True)
class RepairChoice:
    """``rows`` is true for moved rows to recompute. ``shift`` says whether the other rows of their
    spans are shifted (see ``kvboost.reuse.shift``)."""

    rows: Which
    shift: bool = False


@dataclass
class MovedText:
    """The moved rows of a prompt whose answer begins at row ``live_end``, and what probing and
    repairing them has cost."""

    plan: Plan
    live_end: int
    num_layers: int
    charged_tokens: float = field(default=0.0, init=False)
    """Rows through all layers."""
    charged_keys: float = field(default=0.0, init=False)
    """Keys that these rows have attended to."""
    _seen: AttentionMass | None = field(default=None, init=False)
    _deviations: list[Deviation] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.rows, self.unknown = np.zeros((2, self.plan.num_tokens), bool)
        for run in self.runs:
            self.rows[run.start : run.end] = True
        for computed in self.plan.computed():
            self.unknown[computed.start : computed.stop] = True

    @property
    def runs(self) -> Sequence[MovedRun]:
        return self.plan.moved

    def attention(self) -> Floats:
        """Which share of their attention to moved rows the prompt's last rows give to each of them:
        ``[prompt]``. One half is the share of all these rows, the other that of those at the very
        end, with which the answer begins. Late layers count more than the early one."""
        seen = self._observed()
        mass = seen[:, :2] * self.rows[: seen.shape[2]]
        early, late = (mass / np.maximum(mass.sum(-1, keepdims=True), 1e-30)).mean(1)
        scores = np.zeros(len(self.rows), np.float32)
        scores[: len(late)] = EARLY_SHARE * early + (1 - EARLY_SHARE) * late
        return scores

    def last_share(self) -> float:
        """Which share of the last row's attention goes to moved rows. Attention to the prompt's
        first row counts half, by a geometric mean: models that need nothing attend to it, and some
        send half of all attention there."""
        of_last = self._observed()[1, 2] / len(probed_layers(self.num_layers).late)
        moved = float((of_last * self.rows[: len(of_last)])[1:].sum())
        return moved / math.sqrt(max(1e-6, 1 - float(of_last[0])))

    def _observed(self) -> Floats:
        """The attention that the probe has seen, ``[2, KINDS, start]``. Where a model has computed
        NaN, rows receive none."""
        assert self._seen is not None, "the prompt's last rows were not probed"
        self._seen.wait()
        mass: Floats = np.nan_to_num(self._seen.mass.cpu().numpy())
        return mass

    def seams(self) -> Which:
        """The first rows of runs that were read after some of the same text. They attended to
        another neighbour there."""
        rows = np.zeros_like(self.rows)
        for run in self.runs:
            if run.resemblance > 0:
                rows[run.start : min(run.end, run.start + SEAM_ROWS)] = True
        return rows

    def errors(self) -> Floats:
        """The expected error of each moved row, given what has changed before it since it
        was read, and how far before: ``[prompt]``."""
        errors = np.zeros(len(self.rows), np.float32)
        for run in self.runs:
            since = np.arange(run.end - run.start, dtype=np.float32)
            errors[run.start : run.end] = _errors(since, run.rows_changed, run.rows_before)
        return errors

    @cached_property
    def tail(self) -> range:
        """The prompt's last rows, which are probed: they are never moved."""
        rows = probe_rows(self.runs)
        return range(max(self.runs[-1].end, self.live_end - rows), self.live_end)

    def probes(self, repair: RepairParams) -> list[RepairStep]:
        """The steps that must run before the strategy of ``repair`` chooses."""
        if asks_attention(repair):
            return [self.probe_attention()]
        return self.probe_deviation() if repair.strategy == "cacheblend" else []

    def probe_attention(self) -> RepairStep:
        """The probe for ``attention``: the last rows run over the moved KV as it is and do not
        attend to rows that are not computed yet."""
        start = self.tail.start
        hidden = self.unknown[: self.live_end].copy()
        hidden[start:] = False
        absent = torch.from_numpy(hidden)
        bands = probed_layers(self.num_layers)
        self._seen = AttentionMass(bands, absent[:start])
        rows = np.arange(start, self.live_end)
        step = self._probe(rows, self._seen, bands.last)
        return step._replace(absent=absent if hidden.any() else None, may_go_on=True)

    def probe_deviation(self) -> list[RepairStep]:
        """The probes for ``deviation``: all moved and unknown rows run through layer 0."""
        needed = np.flatnonzero((self.rows | self.unknown)[: self.live_end])
        layer = min(1, self.num_layers - 1)
        slices = torch.split(torch.from_numpy(needed), PROBE_SLICE)
        self._deviations = [Deviation(layer, some) for some in slices]
        return [self._probe(one.positions.numpy(), one, layer) for one in self._deviations]

    def deviation(self) -> Floats:
        """The distance of each moved row's keys and values in layer 1 from those computed at its
        new position: ``[prompt]``."""
        scores = np.zeros(len(self.rows), np.float32)
        for one in self._deviations:
            scores[one.positions.numpy()] = one.squared.numpy()
        return scores * self.rows

    def _probe(self, positions: Positions, probe: Probe, until: int) -> RepairStep:
        self._charge(positions, (until + PARTIAL_LAYER) / self.num_layers)
        return RepairStep(torch.from_numpy(positions), probe=probe, until=until)

    def charge(self, rows: Which) -> None:
        """Counts ``rows`` as computed once for the repair."""
        self._charge(np.flatnonzero(rows[: self.live_end]), 1.0)

    def _charge(self, positions: Positions, depth: float) -> None:
        self.charged_tokens += depth * len(positions)
        self.charged_keys += depth * float(positions.sum())

    def charged_flops(self, attention_share: float) -> float:
        """The cost of the repair, as a share of the arithmetic of computing all moved rows.
        ``attention_share``: attending to one key, relative to one row through the weights."""
        moved_keys = float(np.flatnonzero(self.rows).sum())
        computed = self.plan.num_moved + attention_share * moved_keys
        return (self.charged_tokens + attention_share * self.charged_keys) / computed

    def top(self, scores: Floats, num_rows: int) -> Which:
        """The ``num_rows`` moved rows that score highest."""
        candidates = np.flatnonzero(self.rows)
        others = len(candidates) - num_rows
        ranked = scores[candidates].argpartition(min(others, len(candidates) - 1))
        chosen = np.zeros_like(self.rows)
        chosen[candidates[ranked[others:]]] = True
        return chosen

    def spans(self) -> Spans:
        """The runs; a long one is split into parts of about equal length."""
        ranges: list[range] = []
        for run in self.runs:
            length = run.end - run.start
            parts = -(-length // SHIFT_TOKENS)
            bounds = [run.start + length * part // parts for part in range(parts + 1)]
            ranges += (range(*two) for two in pairwise(bounds))
        return Spans.of(ranges, len(self.rows))


def none(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """Moved rows are used as they are."""
    return RepairChoice(np.zeros_like(moved.rows))


def selective(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """The first and the last rows of every run."""
    rows = np.zeros_like(moved.rows)
    for run in moved.runs:
        overlap = min(OVERLAP, run.end - run.start)
        rows[run.start : run.start + overlap] = True
        rows[run.end - overlap : run.end] = True
    return RepairChoice(rows)


def cacheblend(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """The rows whose keys and values deviate most in layer 1, after layer 0 has run in full. The
    fresh rows of layer 1 stay; only the chosen rows continue from there."""
    num_rows = round(repair.ratio * moved.plan.num_moved)
    return RepairChoice(moved.top(moved.deviation(), num_rows))


def random(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """Any rows, the same for the same prompt; the rest of each span is shifted. A control: what a
    choice is worth is what it gains over this."""
    num_rows = round(repair.ratio * moved.plan.num_moved)
    drawn = torch.rand(len(moved.rows), generator=torch.Generator().manual_seed(num_rows))
    return RepairChoice(moved.top(drawn.numpy(), num_rows), shift=True)


def asks_attention(repair: RepairParams) -> bool:
    """Whether a repair chooses rows by ``MovedText.attention``."""
    return repair.strategy in ("auto", "query") and 0 < repair.ratio < 1


def query(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """Chooses the rows that the prompt's last rows attend to, and seams; shifts the rest of each
    span."""
    num_rows = round(repair.ratio * moved.plan.num_moved)
    if num_rows in (0, moved.plan.num_moved):  # nothing to choose
        return RepairChoice(moved.rows.copy() if num_rows else np.zeros_like(moved.rows))
    scores = moved.attention()
    scores[moved.seams()] = np.inf
    return RepairChoice(moved.top(scores, num_rows), shift=True)


def auto(moved: MovedText, repair: RepairParams) -> RepairChoice:
    """Chooses the rows that the prompt's last rows attend to; shifts the rest of each span. It
    chooses more rows if the answer depends more on moved text than is typical. If little has
    changed since the text was read, it chooses fewer rows, first those that are expected to be off
    most, for example after a seam. If much has changed, all rows are off: attention and seams
    decide, as in ``query``."""
    if not asks_attention(repair):
        return query(moved, repair)
    attention, errors = moved.attention(), moved.errors()
    needed = needed_share(float((attention * errors).sum()))  # the error that those rows see
    ratio = repair.ratio * needed
    ratio *= min(max(moved.last_share() / TYPICAL_SHARE, LEAST_BUDGET), MOST_BUDGET)
    num_rows = min(max(1, round(ratio * moved.plan.num_moved)), moved.plan.num_moved)
    scores = attention * errors ** (1 - needed)
    if needed == 1.0:
        scores[moved.seams()] = np.inf
    return RepairChoice(moved.top(scores, num_rows), shift=True)


STRATEGIES: dict[str, Callable[[MovedText, RepairParams], RepairChoice]] = {
    "auto": auto,
    "query": query,
    "cacheblend": cacheblend,
    "selective": selective,
    "random": random,
    "none": none,
}
