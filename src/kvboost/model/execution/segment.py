"""Segments: the rows that one request sends through the model together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right

from kvboost.model.execution.kv import LayerRows, RequestKV

if TYPE_CHECKING:
    from kvboost.model.paged.sampling import RowSampler

BLOCK_ROWS = 512


class ChunkWindow(int):
    """A window that does not slide: rows attend to keys in their own stretch of so many
    positions."""


def is_beyond(window: int, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Which of the ``keys`` before them a layer's ``window`` hides from ``queries``; both are
    positions that can be broadcast."""
    if isinstance(window, ChunkWindow):
        return keys < queries // window * window
    return keys <= queries - window


class Rules(NamedTuple):
    """The rules of a layer's attention. A row sees the last ``window`` keys up to its own. Scores
    pass through ``softcap * tanh(x / softcap)``. ``sinks``, ``[heads]``, are one more score of each
    head, whose value is zero. ``rotated``: rows are both keys and values (latents), and their first
    channels, so many, are no part of a value: those of a result mean nothing."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    rotated: int | None = None


@dataclass(frozen=True)
class ImageRows:
    """The rows of a segment that are rows of images: the model is given features, and no tokens."""

    rows: torch.Tensor
    """Their numbers in the segment, ``[rows]``, on the host."""
    features: torch.Tensor
    """``[rows, parts, width]``, on the model's device: what replaces the embeddings of tokens, and
    what is added to the rows after each of the first layers (DeepStack)."""
    ahead: tuple[tuple[int, int], ...] = ()
    """Positions ``[start, end)`` of images whose rows also attend to those after them, up to the
    end. All of these are in the request's KV, or in the segment."""


class Hook:
    """Sees one segment in every layer, and may change the rows of ``kv`` that the segment does not
    compute."""

    kv: LayerRows
    """The rows of its request; a segment sets it to its own."""
    kind: str | None = None
    """Which captured forwards over pages do the same (``reuse/paged/hooks.py``), if any do."""
    args: tuple[Any, ...] | None = None
    """The arguments of which another rank makes the same hook, if it can."""
    is_complete: Callable[[], bool] | None = None
    """Whether it has seen all, if a GPU may still be at it."""
    averages = False
    """Whether what it observes is the mean over heads, and not the sum."""

    def observed(self) -> torch.Tensor | None:
        """The observations of this hook about the heads of this rank; None if it makes none."""
        return None

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Called before the segment's fresh rows, ``[rows, kv_heads, dim]``, are written over what
        ``kv`` holds at their positions."""

    def on_query(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        """Called before attention of ``query``, ``[rows, heads, dim]``; the fresh rows are in
        place."""


@dataclass
class Segment:
    """Tokens of one request that go through the model together.

    ``positions`` is a ``range`` if they are consecutive, else an increasing tensor. Every row of
    ``kv`` below the last position must be written before, or by this segment itself, unless it is
    ``absent``: ``[end]``, on the host, true for rows that no query may attend to.
    The forward returns logits of the last ``num_logits`` rows. With ``until``, it ends in that
    layer after its fresh rows are written and the hook has seen its queries; there are no logits.
    If it ``may_go_on``, other segments of its forward may need more layers: what those write into
    its rows is written again before it is read.
    ``as_stock``: if it is alone in the forward, it makes the calls that stock transformers makes;
    in bfloat16 only if it begins at position 0. ``sampler``: the result is to be the next token,
    picked on the device, not logits; with several rows, the tokens after each of the last
    ``num_logits``. ``decodes``: these rows continue an answer. ``ahead``: the row after this one
    will be asked for with that token, unless the request ends, so it may be computed before.
    ``beside``: earlier rows of the same request, without logits, that run in the same forward or
    before it; ``beside_ahead``: those beside the row after this one. ``images``: which rows are
    those of images. ``places``, ``[3, rows]`` on the host: what the rows are rotated by in time,
    height and width, if that is not their positions (M-RoPE).
    """

    kv: RequestKV
    token_ids: torch.Tensor
    positions: range | torch.Tensor
    num_logits: int = 1
    hook: Hook | None = None
    absent: torch.Tensor | None = None
    until: int | None = None
    may_go_on: bool = False
    as_stock: bool = False
    sampler: RowSampler | None = None
    decodes: bool = False
    ahead: bool = False
    beside: Segment | None = None
    beside_ahead: Segment | None = None
    images: ImageRows | None = None
    places: torch.Tensor | None = None
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict, repr=False)
    _own_masks: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._num_rows = self.token_ids.shape[0]  # read in every layer
        if self.hook is not None:
            self.hook.kv = self.kv
        if isinstance(self.positions, torch.Tensor):
            self.positions = self.positions.to(self.kv.positions_on)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def first(self) -> int:
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """One past the last position: keys are rows ``[0, end)``."""
        return int(self.positions[-1]) + 1

    def position_ids(self, device: torch.device) -> torch.Tensor:
        if isinstance(self.positions, range):
            return torch.arange(self.positions.start, self.positions.stop, device=device)
        return self.positions.to(device)

    @property
    def is_plain(self) -> bool:
        """Whether these are consecutive rows that attend to everything before them, and to nothing
        else."""
        return isinstance(self.positions, range) and self.absent is None and not self.whole_images

    @property
    def whole_images(self) -> tuple[tuple[int, int], ...]:
        """Images whose rows attend to those after them: see ``ImageRows``."""
        return () if self.images is None else self.images.ahead

    def num_before(self, position: int) -> int:
        """The number of its rows before ``position``."""
        if isinstance(self.positions, range):
            return min(max(position - self.positions.start, 0), len(self))
        return int((self.positions < position).sum())

    def hides(self, window: int | None) -> bool:
        """Whether the window of a layer hides any key from this segment."""
        return bool(window) and self.end > window  # type: ignore[operator]

    def narrow(self, rules: Rules) -> Rules:
        """The rules of a layer without a window that hides nothing from this segment."""
        if rules.window is None or self.hides(rules.window):
            return rules
        return rules._replace(window=None)

    @cached_property
    def corner(self) -> CausalBias | None:
        """The causal mask of a sequence's last rows, in the form that GPU kernels know; None for
        one row."""
        return causal_lower_right(len(self), self.end) if len(self) > 1 else None

    def own_mask(self, groups: int, like: torch.Tensor) -> torch.Tensor:
        """The mask over the request's own rows, for the queries of ``groups`` heads as rows of one
        matrix: additive ``[groups * rows, keys]``, on the grid; made once a forward."""
        if groups not in self._own_masks:
            rows = self.position_ids(like.device) - self.kv.own_start
            own = Block.of(0, rows, None, like, grid=self.kv.shape.grid)
            self._own_masks[groups] = own.mask.repeat(groups, 1)
        return self._own_masks[groups]

    def blocks(self, window: int | None, like: torch.Tensor) -> list[Block]:
        """The rows in blocks, each with the keys it may attend to; made once a forward."""
        if window not in self._blocks:
            positions = self.position_ids(like.device)
            rules = window, like, self.absent, self.whole_images
            grid = self.kv.shape.grid
            self._blocks[window] = [
                Block.of(start, positions[start : start + BLOCK_ROWS], *rules, grid=grid)
                for start in range(0, len(self), BLOCK_ROWS)
            ]
        return self._blocks[window]


@dataclass(frozen=True)
class Block:
    """Rows ``[start, end)`` of a segment and the keys ``[first_key, end_key)`` they may attend to.
    Attending block by block leaves out most of the keys that the mask hides."""

    start: int
    end: int
    first_key: int
    end_key: int
    mask: torch.Tensor
    """Additive ``[rows, keys]``, its width padded in memory to a multiple of 8 as the GPU's
    kernels want it. On the grid there are more rows and keys than needed; such keys are hidden."""

    @classmethod
    def of(
        cls,
        start: int,
        positions: torch.Tensor,
        window: int | None,
        like: torch.Tensor,
        absent: torch.Tensor | None = None,
        ahead: Sequence[tuple[int, int]] = (),
        *,
        grid: int = 1,
    ) -> Block:
        first, last = int(positions[0]), int(positions[-1])
        reach = max(last + 1, *(end for begin, end in ahead if begin <= last), 0)
        first_key = 0
        if isinstance(window, ChunkWindow):
            first_key = first // window * window // grid * grid
        elif window is not None:
            first_key = max(0, first + 1 - window) // grid * grid
        end_key = round_up(reach, grid)
        keys = torch.arange(first_key, end_key, device=like.device)
        queries = positions[:, None]
        hidden = keys > queries
        for begin, end in ahead:
            inside = (queries >= begin) & (queries < end)
            hidden &= ~(inside & (keys >= begin) & (keys < end))
        if window is not None:
            hidden |= is_beyond(window, keys, queries)
        if absent is not None:
            end = min(reach, len(absent))
            hidden[:, : end - first_key] |= absent[first_key:end].to(like.device)
        rows, width = round_up(len(positions), grid), round_up(len(keys), 8)
        mask = torch.zeros(rows, width, dtype=like.dtype, device=like.device)[:, : len(keys)]
        mask[: len(positions)].masked_fill_(hidden, float("-inf"))
        return cls(start, start + len(positions), first_key, end_key, mask)


def round_up(length: int, grid: int) -> int:
    return -(-length // grid) * grid


def rows_first(rows: torch.Tensor) -> torch.Tensor:
    """``[1, heads, rows, dim]`` as ``[rows, heads, dim]``."""
    return rows[0].transpose(0, 1)


def heads_first(rows: torch.Tensor) -> torch.Tensor:
    """``[rows, heads, dim]`` as ``[1, heads, rows, dim]``."""
    return rows.transpose(0, 1)[None]


def split(rows: torch.Tensor, segments: Sequence[Segment]) -> Sequence[torch.Tensor]:
    """Packed ``[1, heads, total, dim]`` as one tensor per segment."""
    if len(segments) == 1:
        return (rows,)
    return rows.split([len(segment) for segment in segments], dim=2)
