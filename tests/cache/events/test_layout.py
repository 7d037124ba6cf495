from __future__ import annotations

from kvboost.cache.events.announcements import Cleared, Removed, Stored
from kvboost.cache.events.layout import as_map, block_hashes, medium
from kvboost.tokens.hashing import as_token_ids, root_key

ROOT = root_key("model", "")


def test_a_block_is_named_by_everything_before_its_end() -> None:
    ids = list(range(10))
    names = block_hashes(ROOT, as_token_ids(ids), 4)
    assert len(names) == 2 and len(set(names)) == 2 and all(len(name) == 8 for name in names)
    assert block_hashes(ROOT, as_token_ids(ids[:4]), 4) == names[:1]
    assert block_hashes(ROOT, as_token_ids([9, *ids[1:]]), 4)[1] != names[1]
    assert block_hashes(root_key("another", ""), as_token_ids(ids), 4) != names


def test_events_have_the_fields_of_vllm() -> None:
    stored = Stored((b"\x01\x00", b"\x02"), b"\x03", (1, 2, 3, 4))
    assert as_map(stored, 2, "CPU") == {
        "type": "BlockStored",
        "block_hashes": [256, 2],
        "parent_block_hash": 3,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
    }
    assert as_map(Stored((b"\x01",), None, (1, 2)), 2, "CPU")["parent_block_hash"] is None
    removed = {"type": "BlockRemoved", "block_hashes": [7], "medium": "STORAGE"}
    assert as_map(Removed((b"\x07",)), 2, "STORAGE") == removed
    assert as_map(Cleared(), 2, "CPU") == {"type": "AllBlocksCleared"}


def test_a_folder_or_a_remote_store_promises_storage_only() -> None:
    assert (medium(is_slow=False), medium(is_slow=True)) == ("CPU", "STORAGE")
