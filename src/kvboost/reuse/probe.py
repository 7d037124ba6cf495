"""Probes: hooks of the forward that observe attention, or the deviation of moved rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from kvboost.model.execution.partial_attention import sink_shares
from kvboost.model.execution.segment import Hook, Rules, heads_first, is_beyond
from kvboost.model.native.moved_rows import attention_mass

_SCORES = 1 << 24  # attention weights held at a time: a long prompt has many


END_ROWS = 5
"""A chat template adds about so many tokens after the question."""
KINDS = 3


@dataclass(frozen=True)
class Bands:
    """The layers in which a probe observes attention. A layer in both is a late one."""

    early: range
    late: range

    def number(self, layer: int) -> int | None:
        """0 for early layers, 1 for late ones, None for those that are not observed."""
        return 1 if layer in self.late else 0 if layer in self.early else None

    @property
    def last(self) -> int:
        """The last layer that is observed."""
        return self.late[-1]


def row_weights(num_rows: int) -> torch.Tensor:
    """The weight of each of a prompt's last rows in the sums of :class:`AttentionMass`,
    ``[KINDS, num_rows]``: all rows alike, the last ``END_ROWS`` of them, the last one."""
    weights = torch.ones(KINDS, num_rows)
    weights[1, :-END_ROWS] = weights[2, :-1] = 0
    return weights


class Probe(Hook):
    """A hook that observes rows, which run up to one of the layers for that."""

    def observed(self) -> torch.Tensor:
        raise NotImplementedError

    def in_pages(self, sees_mass: Callable[[AttentionMass], Hook]) -> Hook:
        """The hook that observes the same over pages, where kernels do what ``sees_mass`` says."""
        return self


class AttentionMass(Probe):
    """Sums, over the layers of each band, how much a prompt's last rows attend to each row before
    them: ``mass`` is ``[2, KINDS, start]``, the weights after softmax, averaged over heads and
    summed over the rows from ``start`` on by their ``row_weights``. Rows that are ``absent``,
    ``[start]``, on the host, receive none."""

    averages = True

    def __init__(self, bands: Bands, absent: torch.Tensor) -> None:
        self.args = (bands, absent)
        self.bands = bands
        self.absent = absent
        self.wait: Callable[[], None] = lambda: None
        """Returns when ``mass`` is complete: a GPU may still be at it."""
        self._masks: dict[int | None, torch.Tensor] = {}

    @property
    def start(self) -> int:
        return len(self.absent)

    def observed(self) -> torch.Tensor:
        self.wait()
        return self.mass

    def in_pages(self, sees_mass: Callable[[AttentionMass], Hook]) -> Hook:
        return sees_mass(self)

    @cached_property
    def mass(self) -> torch.Tensor:
        return torch.zeros(2, KINDS, self.start)

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        scale, window, softcap, sinks, _ = rules
        if (band := self.bands.number(layer)) is None:
            return
        kv, query, start = self.kv, heads_first(query), self.start
        self.mass = self.mass.to(query.device)
        _, heads, rows, dim = query.shape
        counted = row_weights(rows)
        if window is None and softcap is None:
            at_once = attention_mass(kv, layer, query, scale, self.absent, counted, sinks)
            if at_once is not None:
                self.mass[band] += at_once
                return
        counted = counted.to(query.device)
        keys, _ = kv.layer(layer, 0, start + rows)
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        folded = (query * scale).reshape(kv_heads, group * rows, dim)
        hidden = self._hidden(rows, window, query)
        most = max(1, _SCORES // (rows * (start + rows)))  # heads at a time
        for first in range(0, kv_heads, max(1, most // group)):
            some = slice(first, first + max(1, most // group))
            for part in range(0, group, most):
                queries = folded[some, part * rows : (part + most) * rows]
                scores = torch.matmul(queries, keys[0, some].transpose(1, 2))
                if softcap is not None:
                    scores = torch.tanh(scores / softcap) * softcap
                scores = scores.view(-1, rows, start + rows).add_(hidden)
                weights = torch.softmax(scores, -1, dtype=torch.float32)
                if sinks is not None:
                    of_some = sinks.view(kv_heads, group)[some, part : part + most]
                    total = scores.float().logsumexp(-1, keepdim=True)
                    weights *= sink_shares(total, of_some.reshape(-1, 1, 1))
                self.mass[band] += (counted @ weights).sum(0)[:, :start] / heads

    def _hidden(self, rows: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """The mask of the last rows, to be added to scores; made once for each window."""
        if window not in self._masks:
            start = self.start
            positions = torch.arange(start + rows, device=like.device)
            hidden = positions > positions[start:, None]
            if window is not None:
                hidden |= is_beyond(window, positions, positions[start:, None])
            hidden[:, :start] |= self.absent.to(like.device)
            mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
            self._masks[window] = mask.masked_fill_(hidden, float("-inf"))
        return self._masks[window]


class Deviation(Probe):
    """The distance of the recomputed keys and values of rows, at ``positions`` on the host, from
    the cached ones in ``layer``. ``squared``, ``[rows]``, is the squared distance of keys and
    values together."""

    def __init__(self, layer: int, positions: torch.Tensor) -> None:
        self.args = (layer, positions)
        self.layer = layer
        self.positions = positions
        self.squared = torch.zeros(len(positions), device=positions.device)

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        if layer != self.layer:
            return
        known = self.kv.layer(layer, 0, int(self.positions[-1]) + 1)
        positions = self.positions.to(keys.device)
        for fresh, stale in zip((keys, values), known, strict=True):
            distance = heads_first(fresh).float() - stale[:, :, positions].float()
            self.squared += distance.square().sum((0, 1, 3)).to(self.squared.device)

    def observed(self) -> torch.Tensor:
        return self.squared
