"""The unit of reuse: the keys and values of a run of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvboost.cache.quantize import KVData
from kvboost.tokens.hashing import ChunkKey, TokenIds


class Lineage(str, Enum):
    """Whether all rows before a chunk's own were exact."""

    EXACT = "exact"
    """Every row before it was exact: it may serve exact hits."""
    APPROXIMATE = "approximate"
    """Some row before it was moved: it never serves an exact hit."""


@dataclass(frozen=True)
class Origin:
    """The model that computed the KV: a fingerprint of everything the KV depends on, and a name
    that people know the model by."""

    fingerprint: str
    name: str = ""


@dataclass(frozen=True, eq=False)
class ChunkInfo:
    """A chunk without its tensors: what indexes and plans need."""

    key: ChunkKey
    parent: ChunkKey
    before: ChunkKey
    """The chunk directly before it: its parent, or the chunk that its branch starts from."""
    root: ChunkKey
    """The root of its tree: one model, one salt."""
    token_ids: TokenIds
    base_position: int
    lineage: Lineage
    bits: int
    nbytes: int
    """Size of its data; a file is a little larger. 0 if it is not known yet."""
    origin: Origin
    signed: bool = False
    """Whether it is signed with a secret. Without the secret it cannot be checked, nor used."""
    lag: int = 0
    """By how much the places that its keys are rotated to are less than its positions: after an
    image, models with M-RoPE go on at an earlier place. One number for all of its rows."""
    has_state: bool = False
    """Whether its data says what layers without rows hold after its last token: a prompt can go on
    from there. Of models without such layers, none has."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.base_position + len(self.token_ids)

    def is_usable(self, origin: Origin, has_secret: bool) -> bool:
        """Whether an engine of this model can use it. Chunks of other models, and signed ones that
        cannot be checked, only take room."""
        return self.origin.fingerprint == origin.fingerprint and self.signed == has_secret

    def is_as_planned(self, planned: ChunkInfo) -> bool:
        """Whether a chunk that was read is the one that a plan promised. Precision and size are
        left to :class:`kvboost.cache.quantize.KVFormat`: a plan may not know them yet."""
        if self is planned:
            return True
        return (
            self.key == planned.key
            and self.parent == planned.parent
            and self.before == planned.before
            and self.root == planned.root
            and self.base_position == planned.base_position
            and self.lineage is planned.lineage
            and self.origin.fingerprint == planned.origin.fingerprint
            and (
                self.token_ids is planned.token_ids
                or np.array_equal(self.token_ids, planned.token_ids)
            )
        )


@dataclass(frozen=True, eq=False)
class KVChunk:
    """Immutable. ``data`` holds the keys and values of ``info.token_ids``, starting at
    ``info.base_position``."""

    info: ChunkInfo
    data: KVData

    def __post_init__(self) -> None:
        assert self.data.num_tokens == self.info.num_tokens

    @property
    def key(self) -> ChunkKey:
        return self.info.key

    @property
    def nbytes(self) -> int:
        return self.info.nbytes
