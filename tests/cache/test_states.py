"""Which states of earlier turns are dropped."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.mixed import states_of, with_states
from kvboost.cache.states import TurnEnds, rows_only
from support.chunks import make_chunk


def chunk_at(position: int) -> KVChunk:
    """A chunk of eight tokens with a state."""
    chunk = make_chunk(range(position, position + 8), position=position)
    data = with_states(chunk.data, [torch.ones(5)])
    info = replace(chunk.info, has_state=True, nbytes=data.nbytes)
    return KVChunk(info, data)


def test_a_chunk_without_its_states_is_as_large_as_its_rows() -> None:
    chunk = chunk_at(0)
    smaller = rows_only(chunk)
    assert states_of(smaller.data) == [] and not smaller.info.has_state
    assert chunk.nbytes - smaller.nbytes == 20 and smaller.key == chunk.key
    assert smaller.info.nbytes == smaller.data.nbytes


def test_turns_before_the_last_are_over_unless_something_needs_them() -> None:
    path = [chunk_at(start).info for start in (0, 8, 16, 24)]
    turns = TurnEnds()
    turns.note(path, frozenset({8, 16, 24}))  # the last one ends elsewhere
    needed = {path[1].key}
    assert turns.over(path, 24, needed.__contains__) == [path[0]]
    assert turns.over(path, 24, needed.__contains__) == [], "it is a turn's end no more"
    turns.on_gone(path[1].key)
    assert turns.over(path, 99, lambda _: False) == [path[2]]
