"""The systems of a comparison, by name."""

from __future__ import annotations

from kvboost.bench.peers.base import Peer
from kvboost.bench.peers.kvboost_server import KVBoostServer
from kvboost.bench.peers.llamacpp import LlamaCpp
from kvboost.bench.peers.vllm_cpu import VLLM

OURS = "kvboost"
BASELINE = "kvboost-baseline"

SYSTEMS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        KVBoostServer(OURS, "chunk_kv_reuse"),
        KVBoostServer(BASELINE, "baseline"),
        VLLM(),
        LlamaCpp(),
    )
}
