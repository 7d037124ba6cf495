"""The groups of layers for which vLLM allocates and frees pages alike.

With its hybrid KV cache manager, vLLM keeps all rows of full-attention layers and frees those of
windowed layers as soon as they leave the window. Each group has a table of its own; a page that was
freed is 0 in it.

A layer with states has no rows. vLLM keeps its states at the ends of some pages, and a page of its
group is the memory of the states at that page's end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

Tables = tuple[tuple[int, ...], ...]
"""The pages of a request in each group, in order. Page 0 holds no rows."""


@dataclass(frozen=True)
class Groups:
    """``windows`` has the rows that each group keeps, None for all; ``names`` its layers. The
    groups whose numbers are ``with_states`` have states and no rows. ``page`` is the number of rows
    in a page, for which vLLM may have chosen another than was asked for; None without groups."""

    windows: tuple[int | None, ...]
    names: tuple[tuple[str, ...], ...]
    with_states: tuple[int, ...] = ()
    page: int | None = None

    @classmethod
    def of(cls, caches: KVCacheConfig) -> Groups:
        from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

        groups = caches.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        with_states = tuple(n for n, one in enumerate(specs) if isinstance(one, MambaSpec))
        return cls(
            tuple(
                one.sliding_window if isinstance(one, SlidingWindowSpec) else None for one in specs
            ),
            tuple(tuple(group.layer_names) for group in groups),
            with_states,
            specs[0].block_size if specs else None,
        )

    @property
    def is_one(self) -> bool:
        """Whether vLLM keeps all rows of all layers, in the same pages."""
        return len(self.windows) == 1 and self.window is None and not self.with_states

    @property
    def window(self) -> int | None:
        """The rows of the smallest window; None if vLLM keeps all rows of all layers."""
        return min((one for one in self.windows if one is not None), default=None)

    @property
    def stateful(self) -> dict[str, int]:
        """The layers with states, each with the number of its group."""
        return {name: number for number in self.with_states for name in self.names[number]}

    def layers(self, targets: Mapping[str, str | None]) -> list[list[int]]:
        """The numbers of each group's layers. ``targets`` are all layers in order, each with the
        layer whose rows it reads if it has none: vLLM's groups do not name it."""
        return [
            [
                number
                for number, (name, target) in enumerate(targets.items())
                if name in group or target in group
            ]
            for group in self.names
        ]


def first_row(tables: Sequence[Sequence[int]], page: int) -> int:
    """The first row from which on every group has all rows."""
    return page * max(
        next((number for number, one in enumerate(table) if one), len(table)) for table in tables
    )
