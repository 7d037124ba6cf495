"""Blocks that are announced to routers: all of them can be loaded, and none is approximate."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from kvboost.cache.events.announcements import Announcements, Removed, Stored
from kvboost.integrations.vllm.options import Options, RequestOptions
from kvboost.integrations.vllm.planner import Hello, Planner, prompt_ids, salt_of
from kvboost.tokens.hashing import ChunkKey, TokenIds

PAGE = 16
SALT = salt_of(None, None)


class Router:
    """Listens, and knows what is where."""

    def __init__(self, chunk_size: int = 64) -> None:
        self.options = Options.parse({"chunk_size": chunk_size})
        self.planner = Planner(self.options, PAGE, Announcements(PAGE))
        self.planner.open([Hello("weights", "model", row_bytes=8)])
        self.blocks: set[bytes] = set()

    def read(self, ids: TokenIds, *, exact_rows: int | None = None) -> list[ChunkKey]:
        """A request over ``ids`` ends; returns the chunks that are stored for it."""
        exact = len(ids) if exact_rows is None else exact_rows
        asked = RequestOptions.parse(None, self.options)
        keep, _ = self.planner.keep(ids[:exact], [], SALT, asked)
        self.planner.announce(hashes(ids)[: exact // PAGE], ids[:exact], SALT)
        return [info.key for info in keep.infos] if keep is not None else []

    def listen(self) -> list[Stored | Removed]:
        said = self.planner.take_announcements()
        for one in said:
            if isinstance(one, Stored):
                assert not self.blocks & set(one.hashes), "announced twice"
                assert one.parent is None or one.parent in self.blocks
                assert len(one.token_ids) == PAGE * len(one.hashes)
                self.blocks |= set(one.hashes)
            else:
                assert set(one.hashes) <= self.blocks, "removed, but never announced"
                self.blocks -= set(one.hashes)
        return said


def tokens(number: int, seed: int = 0) -> TokenIds:
    return prompt_ids(np.random.default_rng(seed).integers(0, 1000, number).tolist())


def hashes(ids: TokenIds) -> list[bytes]:
    """As vLLM: each block's depends on the one before."""
    names, before = [], b""
    for start in range(0, len(ids) - PAGE + 1, PAGE):
        before = hashlib.sha256(before + ids[start : start + PAGE].tobytes()).digest()
        names.append(before)
    return names


def test_whole_blocks_are_announced_once_in_order() -> None:
    router, ids = Router(), tokens(200)
    router.read(ids)
    (said,) = router.listen()
    assert isinstance(said, Stored) and said.parent is None
    assert list(said.hashes) == hashes(ids) and len(said.hashes) == 200 // PAGE
    assert list(said.token_ids) == ids[:192].tolist()
    router.read(ids)
    assert router.listen() == []


def test_a_longer_text_announces_only_what_is_new() -> None:
    router, ids = Router(), tokens(400)
    router.read(ids[:200])
    router.listen()
    router.read(ids)
    (said,) = router.listen()
    assert isinstance(said, Stored) and said.parent == hashes(ids)[11]
    assert router.blocks == set(hashes(ids))


@pytest.mark.parametrize("chunk_size", [64, 40])
def test_blocks_go_with_any_chunk_that_holds_them(chunk_size: int) -> None:
    router, ids = Router(chunk_size), tokens(240)
    keys = router.read(ids)
    router.listen()
    router.planner.gone(keys[1:2])
    (said,) = router.listen()
    assert isinstance(said, Removed)
    first, end = chunk_size // PAGE, -(-2 * chunk_size // PAGE)
    assert set(said.hashes) == set(hashes(ids)[first:end])
    assert router.listen() == []


def test_a_chunk_that_a_longer_one_replaces_takes_nothing_back() -> None:
    router, ids = Router(), tokens(300)
    (*_, last) = router.read(ids[:100])
    router.listen()
    router.read(ids)
    assert last not in (router.planner.index or ()), "the short chunk was replaced"
    assert all(isinstance(one, Stored) for one in router.listen())
    assert router.blocks == set(hashes(ids))


def test_a_chunk_that_comes_back_at_once_was_never_gone() -> None:
    router, ids = Router(), tokens(128)
    keys = router.read(ids)
    router.listen()
    router.planner.gone(keys)
    router.read(ids)
    assert router.listen() == [] and router.blocks == set(hashes(ids))


def test_approximate_rows_are_not_announced() -> None:
    router, ids = Router(), tokens(320)
    router.read(ids, exact_rows=96)
    router.listen()
    assert router.blocks == set(hashes(ids)[:6])
    router.read(tokens(320, seed=1), exact_rows=0)
    assert router.listen() == []


def test_forgetting_takes_everything_back() -> None:
    router = Router()
    for seed in range(3):
        router.read(tokens(160, seed))
    router.listen()
    assert len(router.blocks) == 30
    router.planner.forget()
    router.listen()
    assert not router.blocks


def test_without_a_listener_nothing_is_noted() -> None:
    planner = Planner(Options.parse({}), PAGE)
    planner.open([Hello("weights", "model", row_bytes=8)])
    planner.announce(hashes(tokens(64)), tokens(64), SALT)
    assert planner.take_announcements() == []
