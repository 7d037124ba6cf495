"""KV events of ``kvboost serve``: vLLM's own classes read them as vLLM's."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import httpx
import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
)

from support.kv_events import Subscriber
from support.server_process import ServerProcess
from support.vllm_engines import MODEL

BLOCK = 16


def test_vllm_reads_the_events_of_our_server(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    arguments = ("--model", str(MODEL), "--kv-events", endpoint)
    with ServerProcess(*arguments, folder=tmp_path) as server:
        router, fresh = Subscriber(endpoint), count(1000)

        def read(ids: list[int]) -> None:
            body = {"model": MODEL.name, "prompt": ids, "max_tokens": 1}
            reply = httpx.post(f"{server.url}/completions", json=body, timeout=60)
            assert reply.status_code == 200, reply.text

        router.join(lambda: read([next(fresh)] * BLOCK))
        text = list(range(5000, 5160))
        read(text[:80])
        read(text)
        router.listen_until(lambda router: tuple(text) in router.texts)
        server.terminate()
        router.listen_until(lambda router: not router.blocks)
        assert server.wait() == 0

    decode = msgspec.msgpack.Decoder(KVEventBatch).decode
    batches = [decode(payload) for payload in router.payloads]
    assert all(batch.data_parallel_rank == 0 for batch in batches)
    events = [event for batch in batches for event in batch.events]
    assert {type(event) for event in events} == {BlockStored, BlockRemoved, AllBlocksCleared}
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert {event.block_size for event in stored} == {BLOCK}
    assert {event.medium for event in stored} == {"CPU"}
    known = {name: event for event in stored for name in event.block_hashes}
    told = [token for event in stored if event.token_ids[0] >= 5000 for token in event.token_ids]
    assert told == text
    assert any(event.parent_block_hash in known for event in stored)
    # What vLLM would write for the same events.
    encode = msgspec.msgpack.Encoder().encode
    assert [encode(batch) for batch in batches] == router.payloads
    router.close()
