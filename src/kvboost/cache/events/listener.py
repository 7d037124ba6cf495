"""The listener to which a store tells what becomes of its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvboost.cache.lookup.hits import Hit
from kvboost.tokens.hashing import ChunkKey, TokenIds


class StoreListener(Protocol):
    """Called with the store's lock held: a method must return at once."""

    def on_stored(self, token_ids: TokenIds, exact: Sequence[Hit]) -> None:
        """A request's rows were admitted. The ``exact`` hits hold the first of ``token_ids``."""

    def on_gone(self, key: ChunkKey) -> None:
        """A chunk has left its last tier."""

    def on_cleared(self) -> None:
        """Everything was forgotten."""
