"""Our announcements as vLLM's KV events."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvboost.integrations.vllm.events import Removed, Stored

MEMORY, STORAGE = "CPU", "STORAGE"


def as_events(
    announced: Sequence[Stored | Removed], *, page: int, is_slow: bool
) -> list[KVCacheEvent]:
    """``is_slow`` says that there is a folder or a remote store: a block may then be in memory, but
    only storage is promised."""
    medium = STORAGE if is_slow else MEMORY
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
