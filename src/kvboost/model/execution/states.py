"""The states of layers that fold all text into tensors of one size: linear attention, state-space
layers and short convolutions.

Such a layer has no row for each token. It can go on after a row only with the state that it had
there, so a request keeps copies of its states at some rows (``marks``), and the cache stores them
with the chunk that ends there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

CONV, RECURRENT = "conv", "recurrent"


class StatePlace(NamedTuple):
    """Which state of a model a tensor is. A layer may have several of a kind."""

    layer: int
    kind: str
    number: int


@dataclass(frozen=True)
class StateShape:
    """The states of one sequence in all layers."""

    places: tuple[StatePlace, ...]
    tensors: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    """The dtype and shape of each."""
    devices: tuple[torch.device, ...] = ()

    @property
    def nbytes(self) -> int:
        """The memory of the states at one row."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.tensors)

    def __bool__(self) -> bool:
        return bool(self.places)


class StateLost(RuntimeError):
    """A forward failed in the middle, so the states are those of no row."""


class LayerStates:
    """States as a model's layers call them, through the cache that is their ``past_key_values``."""

    def __init__(self) -> None:
        self._now: dict[StatePlace, torch.Tensor] = {}

    def get(self, place: StatePlace) -> torch.Tensor | None:
        """A state, which the layer may change in place; None before the first row."""
        return self._now.get(place)

    def has(self, layer: int | None, index: int | None) -> bool:
        """Whether a layer, or any, has a state."""
        return any(
            layer in (None, place.layer) and index in (None, place.number) for place in self._now
        )

    def extend_conv(
        self, place: StatePlace, columns: torch.Tensor, width: int | None
    ) -> torch.Tensor:
        """The columns that a convolution sees, ``[sequences, channels, columns]``: those it holds,
        then the new ones. Holds the last ``width`` of them."""
        held = self.get(place)
        width = held.shape[-1] if held is not None else width or columns.shape[-1]
        if held is not None:
            columns = torch.cat([held, columns], dim=-1)
        elif columns.shape[-1] < width:
            columns = torch.nn.functional.pad(columns, (width - columns.shape[-1], 0))
        self._now[place] = columns[..., columns.shape[-1] - width :].clone()
        return columns

    def set(self, place: StatePlace, state: torch.Tensor) -> torch.Tensor:
        """Replaces a state; its dtype stays that of the first one."""
        held = self._now.get(place)
        if held is None:
            self._now[place] = state.clone()
        elif held is not state:
            held.copy_(state)
        return self._now[place]


class RowStates(LayerStates):
    """The states of one request: after row ``row - 1``, and copies from earlier rows."""

    def __init__(self, shape: StateShape, every: int | None = None) -> None:
        """``every``: the states are copied at multiples of so many rows, and where ``mark`` says;
        None: they are not copied."""
        super().__init__()
        self.shape = shape
        self._every = every
        self._marks: dict[int, bool] = {}
        self._row: int | None = 0
        self._is_stacked = False
        """Whether the states are rows of tensors that have those of other requests too."""
        self._kept: dict[int, list[torch.Tensor]] = {}
        self._last: tuple[object, torch.Tensor] | None = None
        self._placed: tuple[int, Sequence[torch.Tensor]] = (0, ())
        self.ends: set[int] = set()
        """The rows at which stored chunks end that this request has used or made."""

    @property
    def nbytes(self) -> int:
        """The memory of all states and copies, and of what the next forward makes beside them if
        it is shared with others."""
        return self.shape.nbytes * (1 + self._is_stacked + len(self._kept))

    def mark(self, row: int, *, lasts: bool = True) -> None:
        """The states are to be copied at this row, if they are copied at all. ``lasts``: not only
        because a prompt ends there."""
        if self._every is not None:
            self._marks[row] = lasts or self._marks.get(row, False)

    def lasts(self, row: int) -> bool:
        """Whether the states at a row are kept for more than the turn that ends there."""
        return self._is_on_grid(row) or self._marks.get(row, False)

    def _is_on_grid(self, row: int) -> bool:
        return self._every is not None and row % self._every == 0

    def next_mark(self, row: int) -> int | None:
        """The first row after ``row`` at which the states are to be copied."""
        marks = [mark for mark in self._marks if mark > row]
        if self._every is not None:
            marks.append((row // self._every + 1) * self._every)
        return min(marks, default=None)

    def begin(self, row: int) -> None:
        """A forward of rows from ``row`` on begins. Until ``end`` the states are those of no
        row."""
        if row == 0:
            self._now.clear()
        elif row != self._row:
            raise StateLost(
                f"rows from {row} on need the states of the layers at row {row}, and those of row "
                f"{self._row} are there: a forward of this request failed; send it again"
            )
        if self._is_stacked:  # otherwise the states of the others would stay in memory
            self._now = {place: state.clone() for place, state in self._now.items()}
            self._is_stacked = False
        self._row = self._last = None

    def end(self, row: int, asked: object, logits: torch.Tensor) -> None:
        """The forward that ``asked`` for is over: the states are those at ``row``."""
        self._row = row
        self._last = asked, logits
        if row in self._marks or self._is_on_grid(row):
            self._kept[row] = [self._now[place].clone() for place in self.shape.places]

    def end_stacked(
        self,
        stacked: Mapping[StatePlace, torch.Tensor],
        row: int,
        asked: object,
        logits: torch.Tensor,
    ) -> None:
        """As :meth:`end`, after a forward of several requests, which has made these states. They
        are rows of larger tensors."""
        self._now.update(stacked)
        self._is_stacked = True
        self.end(row, asked, logits)

    def result_of(self, asked: object) -> torch.Tensor | None:
        """The logits of the last forward, if ``asked`` is what it was for. A batch in which one
        request failed is run again, and no state may go through the same rows twice."""
        return self._last[1] if self._last is not None and self._last[0] is asked else None

    def place(self, row: int, stored: Sequence[torch.Tensor]) -> None:
        """A stored chunk that ends at ``row`` is in place; ``stored`` are its states, if it has
        any."""
        self.ends.add(row)
        self._placed = row, stored

    def resume(self) -> None:
        """Goes on from the states of the chunk that was placed last, which are copied. If it has
        none, the states are those of no row: see :meth:`is_at`."""
        (row, stored), self._placed = self._placed, (0, ())
        self._row, self._last = (row if stored or not row else None), None
        self._now, self._is_stacked = {}, False
        if stored:
            places = zip(self.shape.places, self.shape.devices, stored, strict=True)
            self._now = {
                place: torch.empty_like(one, device=device).copy_(one)
                for place, device, one in places
            }

    def is_at(self, row: int) -> bool:
        """Whether a forward of rows from ``row`` on may follow."""
        return row in (0, self._row)

    def at(self, row: int) -> list[torch.Tensor] | None:
        """The states at ``row``, if they are known. They may change with the next forward."""
        if (kept := self._kept.get(row)) is not None:
            return kept
        if row != self._row or row == 0:
            return None
        return [self._now[place] for place in self.shape.places]

    def known_rows(self, end: int, *, current: bool) -> list[int]:
        """The rows up to ``end`` whose states are copied; with ``current`` also ``end`` itself, if
        the states are those there now."""
        rows = {row for row in self._kept if row <= end}
        return sorted(rows | ({end} if current and end and end == self._row else set()))


class StackedStates(LayerStates):
    """The states of several requests while one row of each goes through the model. Those that the
    requests have stay as they are until :meth:`end`: a forward that fails loses none."""

    def __init__(self, requests: Sequence[RowStates]) -> None:
        super().__init__()
        self._requests = requests

    def get(self, place: StatePlace) -> torch.Tensor | None:
        if place not in self._now and self._requests[0].get(place) is not None:
            self._now[place] = torch.cat([request._now[place] for request in self._requests])
        return self._now.get(place)

    def has(self, layer: int | None, index: int | None) -> bool:
        return self._requests[0].has(layer, index)

    def set(self, place: StatePlace, state: torch.Tensor) -> torch.Tensor:
        held = self.get(place)
        self._now[place] = state if held is None else state.to(held.dtype)
        return self._now[place]

    def end(self, rows: Sequence[int], asked: Sequence[object], logits: torch.Tensor) -> None:
        """The forward that each request ``asked`` for is over: the states are those at ``rows``,
        and a row of ``logits`` belongs to each."""
        for index, request in enumerate(self._requests):
            own = {place: stack[index : index + 1] for place, stack in self._now.items()}
            request.end_stacked(own, rows[index], asked[index], logits[index : index + 1])


class StateCalls:
    """The part of transformers' ``Cache`` that layers with states call. To be mixed into what a
    model gets as ``past_key_values``."""

    states: LayerStates

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StatePlace(layer_idx, CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get(StatePlace(layer_idx, RECURRENT, state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> torch.Tensor:
        place = StatePlace(layer_idx, CONV, state_idx)
        return self.states.extend_conv(place, conv_states, conv_kernel_size)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        return self.states.set(StatePlace(layer_idx, RECURRENT, state_idx), recurrent_states)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return self.states.has(layer_idx, state_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def shape_of_states(states: LayerStates) -> StateShape:
    """The shape of what a probe of some sequences has left, for one sequence."""
    found = sorted(states._now)
    return StateShape(
        tuple(found),
        tuple((states._now[one].dtype, (1, *states._now[one].shape[1:])) for one in found),
        tuple(states._now[one].device for one in found),
    )
