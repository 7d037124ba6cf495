"""Keys of chunks. A key depends on everything that the chunk's KV depends on.

The root holds the model's fingerprint (config, weights, dtype, RoPE, adapter), the caller's salt
and the lineage. Each chunk's key chains its parent's key with its own tokens, so a key names one
exact history. Hashes only find candidates: the prefix tree compares token ids before it trusts
one.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import NewType

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", str)
TokenIds = npt.NDArray[np.int32]
PrefixHashes = npt.NDArray[np.int64]
HASHED_STEP = 32
"""Tokens from one of a text's ``prefix_hashes`` to the next."""
_DIGEST_BYTES = 16
_BASE = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xD6E8FEB86659FD93)


def as_token_ids(ids: object) -> TokenIds:
    """Token ids as a read-only copy."""
    array = np.array(ids, dtype=np.int32)
    array.flags.writeable = False
    return array


def root_key(
    fingerprint: str, salt: str, lineage: str = "exact", *, secret: bytes = b""
) -> ChunkKey:
    """The parent of every first chunk. Fields are length-prefixed: none can imitate another.
    With a ``secret`` the hash is keyed, so the name cannot be computed without it."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, key=secret)
    for field in (fingerprint, salt, lineage):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return ChunkKey(digest.hexdigest())


def chain_key(parent: ChunkKey, token_ids: TokenIds, *, secret: bytes = b"") -> ChunkKey:
    """The key of the chunk that holds ``token_ids`` after ``parent``; keyed with a ``secret``."""
    data = bytes.fromhex(parent) + token_ids.astype("<i4", copy=False).tobytes()
    return ChunkKey(hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=secret).hexdigest())


@lru_cache(maxsize=1 << 16)  # a lookup asks for that of every chunk of a prompt
def branch_key(parent: ChunkKey, repair: str) -> ChunkKey:
    """The root of the approximate continuations of ``parent`` that were repaired as ``repair``
    names. They live beside the exact children of ``parent``."""
    return root_key(parent, repair, "approximate")


def pin_name(root: ChunkKey, token_ids: TokenIds) -> str:
    """The name of the pin of a text, unless it is given another."""
    return f"text-{chain_key(root, token_ids)}"


def common_prefix(left: TokenIds, right: TokenIds) -> int:
    """The length of the longest common prefix."""
    length = min(len(left), len(right))
    first = (left[:length] != right[:length]).tobytes().find(1)
    return length if first < 0 else first


def prefix_hashes(token_ids: TokenIds) -> PrefixHashes:
    """Hashes of the first ``HASHED_STEP`` tokens, of twice as many, and so on, in this process."""
    data, size = token_ids.tobytes(), HASHED_STEP * token_ids.itemsize
    hashes, last = [], 0
    for start in range(0, len(data) - size + 1, size):
        last = hash((last, data[start : start + size]))
        hashes.append(last)
    return np.array(hashes, np.int64)


def common_steps(left: PrefixHashes, right: PrefixHashes) -> int:
    """How many tokens two texts with these hashes begin with, in whole steps. Where many texts are
    compared, this is much faster than ``common_prefix``, which should confirm the result."""
    length = min(len(left), len(right))
    return HASHED_STEP * int(np.count_nonzero(left[:length] == right[:length]))


def window_hashes(space: ChunkKey, token_ids: TokenIds, window: int) -> npt.NDArray[np.uint64]:
    """Hashes of all windows of ``window`` tokens; empty if there are fewer tokens than that."""
    return hashes_in(space, window_polynomials(token_ids, window))


def window_polynomials(token_ids: TokenIds, window: int) -> npt.NDArray[np.uint64]:
    """Of each window of ``window`` tokens, ``sum(token[i] * BASE**i)`` mod 2**64: the difference of
    two sums from the first token on, divided by the power at which the window begins."""
    length = len(token_ids)
    powers, inverses = _powers(max(1024, 1 << length.bit_length()))
    sums = np.zeros(length + 1, np.uint64)
    (token_ids.astype(np.uint64) * powers[:length]).cumsum(out=sums[1:])
    polynomials = sums[window:] - sums[: max(0, length - window + 1)]
    polynomials *= inverses[: len(polynomials)]
    return polynomials


def hashes_in(space: ChunkKey, polynomials: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The hashes of windows: ``space`` is mixed in, and the high bits into the low ones."""
    hashes = polynomials ^ np.uint64(int(space[:16], 16))
    hashes *= _MIX
    hashes ^= hashes >> np.uint64(32)
    return hashes


@lru_cache(maxsize=24)  # one for each power of two
def _powers(count: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The powers of the base and of its inverse mod 2**64, from the 0th on."""
    powers = np.ones((2, count), np.uint64)
    powers[0, 1:], powers[1, 1:] = _BASE, pow(_BASE, -1, 1 << 64)
    first, second = np.cumprod(powers, axis=1)
    return first, second
