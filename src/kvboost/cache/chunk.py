"""The unit of reuse: the keys and values of a run of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvboost.cache.quantize import KVData
from kvboost.tokens.hashing import ChunkKey, TokenIds


class Lineage(str, Enum):
    """What a chunk's rows were computed on."""

    EXACT = "exact"
    """Every row behind it was exact: it may serve exact hits."""
    APPROXIMATE = "approximate"
    """Something behind it was moved: it never serves an exact hit."""


@dataclass(frozen=True)
class Origin:
    """The model whose KV it is: a fingerprint of everything it depends on, and a name people
    know it by."""

    fingerprint: str
    name: str = ""


@dataclass(frozen=True, eq=False)
class ChunkInfo:
    """What a chunk is, without its tensors: what indexes and plans need."""

    key: ChunkKey
    parent: ChunkKey
    before: ChunkKey
    """The chunk it was read behind: its parent, or the one its branch begins at."""
    root: ChunkKey
    """Where its tree begins: one model, one salt."""
    token_ids: TokenIds
    base_position: int
    lineage: Lineage
    bits: int
    nbytes: int
    """Of its data; a file holds a little more."""
    origin: Origin
    key_norm: float = 0.0
    """The mean norm of its keys, if it was measured: a measure of how much they are attended to."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, eq=False)
class KVChunk:
    """Immutable. ``data`` are the keys and values of ``info.token_ids`` from
    ``info.base_position`` on."""

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
