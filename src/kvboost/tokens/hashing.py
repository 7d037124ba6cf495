"""Keys of chunks. A key says everything its KV depends on.

The root holds the model's fingerprint (config, weights, dtype, RoPE, adapter), the caller's salt
and the lineage; each chunk's key chains its parent's with its own tokens. So a key names one
exact history. Hashes only find candidates: the index compares token ids before it trusts one.
"""

from __future__ import annotations

import hashlib
from typing import NewType

import numpy as np
import numpy.typing as npt

ChunkKey = NewType("ChunkKey", str)
TokenIds = npt.NDArray[np.int32]

_DIGEST_BYTES = 16


def as_token_ids(ids: object) -> TokenIds:
    """Token ids as a read-only array of their own."""
    array = np.array(ids, dtype=np.int32)
    array.flags.writeable = False
    return array


def root_key(fingerprint: str, salt: str, lineage: str = "exact") -> ChunkKey:
    """The parent of every first chunk. Fields are length-prefixed: none can imitate another."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for field in (fingerprint, salt, lineage):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return ChunkKey(digest.hexdigest())


def chain_key(parent: ChunkKey, token_ids: TokenIds) -> ChunkKey:
    """The key of the chunk that holds ``token_ids`` behind ``parent``."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    digest.update(bytes.fromhex(parent))
    digest.update(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    return ChunkKey(digest.hexdigest())


def branch_key(parent: ChunkKey, repair: str) -> ChunkKey:
    """Where the approximate continuations of ``parent`` begin, beside its exact children: those
    that were repaired in the way ``repair`` names."""
    return root_key(parent, repair, "approximate")
