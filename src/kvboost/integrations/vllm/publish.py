"""Our announcements as vLLM's KV events."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvboost.cache.events.announcements import Removed, Stored


def as_events(
    announced: Sequence[Stored | Removed], *, page: int, medium: str
) -> list[KVCacheEvent]:
    events: list[KVCacheEvent] = []
    for one in announced:
        hashes = [_external(name) for name in one.hashes]
        if isinstance(one, Removed):
            events.append(BlockRemoved(block_hashes=hashes, medium=medium))
            continue
        events.append(
            BlockStored(
                block_hashes=hashes,
                parent_block_hash=None if one.parent is None else _external(one.parent),
                token_ids=list(one.token_ids),
                block_size=page,
                lora_id=None,
                medium=medium,
                lora_name=None,
            )
        )
    return events


def _external(name: bytes) -> bytes | int:
    """The hash as vLLM publishes it."""
    converted: bytes | int = maybe_convert_block_hash(BlockHash(name))
    return converted
