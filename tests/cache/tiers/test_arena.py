from __future__ import annotations

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.tiers.arena import AHEAD, BLOCK_BYTES, GRAIN, Arena
from kvboost.cache.tiers.gpu import ON_THE_WAY
from kvboost.cache.tiers.open import open_tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig

BLOCK = 8 * GRAIN


class Passed:
    def query(self) -> bool:
        return True


class Gate:
    """A fence that is passed when it is told so."""

    def __init__(self) -> None:
        self.is_passed = False

    def query(self) -> bool:
        return self.is_passed


def block(num_bytes: int) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def make(num_blocks: int, make_fence: type[Passed] = Passed) -> Arena:
    return Arena(block, num_blocks * BLOCK, make_fence, block_bytes=BLOCK)


def empty(arena: Arena, *shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor | None:
    return arena.empty([torch.empty(shape, dtype=dtype, device="meta")])[0]


def grains(arena: Arena, number: int) -> torch.Tensor | None:
    return empty(arena, number, GRAIN // 2, dtype=torch.bfloat16)


@given(st.lists(st.tuples(st.integers(1, 9 * GRAIN), st.integers(0, 3)), max_size=60))
@settings(max_examples=30, deadline=None)
def test_pieces_never_overlap_and_all_room_comes_back(steps: list[tuple[int, int]]) -> None:
    arena = make(4)
    lent: list[tuple[torch.Tensor, int]] = []
    for number, (size, dropped) in enumerate(steps):
        piece = empty(arena, size)
        if size > BLOCK:
            assert piece is None
        if piece is not None:
            lent.append((piece.fill_(number % 251), number % 251))
        del piece
        for _ in range(min(dropped, len(lent))):
            lent.pop(random.Random(number).randrange(len(lent)))
        assert all(bool((there == value).all()) for there, value in lent)
    lent.clear()
    whole = [grains(arena, 8) for _ in range(4)]
    assert all(one is not None for one in whole)
    assert grains(arena, 1) is None
    assert arena.num_bytes == 4 * BLOCK
    arena.close()


def test_a_view_keeps_its_piece() -> None:
    arena = make(1)
    piece = grains(arena, 8)
    assert piece is not None
    view = piece.fill_(3)[2, 5:9]
    del piece
    assert grains(arena, 1) is None
    assert view.tolist() == [3.0] * 4
    del view
    assert grains(arena, 8) is not None


def test_a_piece_is_lent_again_only_after_its_fence() -> None:
    gates: list[Gate] = []

    def fence() -> Gate:
        gates.append(Gate())
        return gates[-1]

    arena = Arena(block, BLOCK, fence, block_bytes=BLOCK)
    piece = grains(arena, 8)
    assert piece is not None
    del piece
    assert grains(arena, 1) is None and len(gates) == 1
    gates[0].is_passed = True
    assert grains(arena, 1) is not None


def test_pieces_that_are_asked_for_together_have_one_fence() -> None:
    gates: list[Gate] = []

    def fence() -> Gate:
        gates.append(Gate())
        gates[-1].is_passed = True
        return gates[-1]

    arena = Arena(block, BLOCK, fence, block_bytes=BLOCK)
    likes = [torch.empty(2, GRAIN // 2, dtype=torch.bfloat16)] * 5
    pieces = arena.empty(likes)
    assert [piece is None for piece in pieces] == [False, False, False, False, True]
    del pieces[1:3]  # each comes back on its own
    again = arena.empty(likes[:3])
    assert [piece is None for piece in again] == [False, False, True] and len(gates) == 1
    assert all(piece is None or piece.shape == likes[0].shape for piece in again)


def test_a_full_cache_has_memory_for_chunks_on_their_way() -> None:
    config = EngineConfig(max_cache_bytes=BLOCK_BYTES, gpu_cache_bytes=0)
    memory = torch.device("cuda")
    ram = open_tiers(config, memory, lambda size: torch.empty(size, dtype=torch.uint8)).ram
    chunk = torch.empty(BLOCK_BYTES // 4, dtype=torch.uint8)
    kept = [ram.allocate(chunk) for _ in range(4 + 2 * ON_THE_WAY // chunk.nbytes)]
    assert len({one.data_ptr() for one in kept}) == len(kept)
    ram.close()


def test_blocks_are_made_ahead_of_their_use_by_another_thread() -> None:
    makers: list[str] = []

    def get_block(num_bytes: int) -> torch.Tensor:
        makers.append(threading.current_thread().name)
        return block(num_bytes)

    arena = Arena(get_block, 9 * BLOCK, Passed, block_bytes=BLOCK)
    kept = [grains(arena, 8)]
    assert arena.num_bytes == BLOCK
    kept.append(grains(arena, 8))
    arena._maker.shutdown()  # waits for what it has been told to make
    assert len(makers) == 2 + AHEAD and all("kvboost-memory" in name for name in makers)
    assert grains(arena, 1) is None


def test_no_more_blocks_are_made_than_may_be_used() -> None:
    made: list[int] = []

    def get_block(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return block(num_bytes)

    arena = Arena(get_block, 2 * BLOCK, Passed, block_bytes=BLOCK)
    kept = [grains(arena, 8) for _ in range(3)]
    assert [one is None for one in kept] == [False, False, True]
    assert made == [BLOCK, BLOCK]


def test_without_memory_or_after_the_end_there_is_no_piece() -> None:
    def refuse(num_bytes: int) -> torch.Tensor:
        raise RuntimeError("no memory")

    assert grains(Arena(refuse, BLOCK, Passed, block_bytes=BLOCK), 1) is None
    closed = make(1)
    closed.close()
    assert grains(closed, 1) is None


@pytest.mark.parametrize("rows", [1, 9])
def test_a_tier_takes_its_memory_from_an_arena_that_has_room(rows: int) -> None:
    arena = make(1)
    tier = RamTier(1 << 30, arena=arena)
    like = torch.ones(rows, GRAIN // 4)
    assert bool((tier.own(like) == like).all())
    assert arena.num_bytes == (BLOCK if rows == 1 else 0)
    tier.close()
