"""KV events as vLLM publishes them.

A message has three frames: a topic, a sequence number of 8 bytes (big-endian) and a payload in
msgpack. The payload is an array, ``[seconds, events, data-parallel rank]``. Events are maps with a
``type``, as in vLLM 0.26 and later; older versions wrote them as arrays.
"""

from __future__ import annotations

import hashlib
from typing import Any

from kvboost.cache.events.announcements import Cleared, Removed, Stored
from kvboost.tokens.hashing import ChunkKey, TokenIds

MEMORY, STORAGE = "CPU", "STORAGE"
_HASH_BYTES = 8


def medium(*, is_slow: bool) -> str:
    """Where blocks are. ``is_slow`` says that there is a folder or a remote store: a block may then
    be in memory, but only storage is promised."""
    return STORAGE if is_slow else MEMORY


def block_hashes(root: ChunkKey, token_ids: TokenIds, block_size: int) -> list[bytes]:
    """The names of the whole blocks of ``token_ids``. Each depends on everything before its end,
    and on ``root``, so they are the same on all servers of a model."""
    names, before = [], bytes.fromhex(root)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = token_ids[start : start + block_size].astype("<i4").tobytes()
        before = hashlib.blake2b(before + block, digest_size=_HASH_BYTES).digest()
        names.append(before)
    return names


def as_map(event: Stored | Removed | Cleared, block_size: int, medium: str) -> dict[str, Any]:
    """One event, with the fields that vLLM always writes."""
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    hashes = [_number(name) for name in event.hashes]
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None if event.parent is None else _number(event.parent),
        "token_ids": list(event.token_ids),
        "block_size": block_size,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
    }


def _number(name: bytes) -> int:
    return int.from_bytes(name, "big")
