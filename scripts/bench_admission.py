"""What it costs the thread that serves to store a request's rows, beside a GPU.

    python scripts/bench_admission.py [requests]

Rows of a prompt of 15 chunks of 128 tokens, the first of which is known, go from pages into full
tiers, and then those of its answer. The model has 28 layers and tiny heads, and the GPU is played
by the CPU: what is left is the time of calls. Prints medians of processor time per request; JSON
comes last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import partial

import numpy as np
import torch

from kvboost.cache.chunk import Origin
from kvboost.cache.quantize import Quantizer
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.arena import Arena
from kvboost.cache.tiers.gpu import GpuTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.model.kv_shape import KVShape
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import Slab
from kvboost.reuse.assemble import Packer
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import as_token_ids, root_key

CHUNK, CHUNKS, ANSWER = 128, 15, 40
ROOT = root_key("model", "")
CPU = torch.device("cpu")
SHAPE = KVShape(28, 1, 2, torch.float32, CPU)
CHUNK_BYTES = CHUNK * SHAPE.row_bytes
UNTIMED = 60
"""Requests that fill the tiers."""


class Passed:
    def query(self) -> bool:
        return True


class HostMemory(RamTier):
    """Takes tensors of the CPU for those of a GPU."""

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return False


def main(requests: int = 150) -> None:
    torch.set_num_threads(1)
    memory = partial(torch.zeros, dtype=torch.uint8)
    arena = Arena(memory, 400 * CHUNK_BYTES, Passed, block_bytes=1 << 23)
    store = ChunkStore(
        Tiers(HostMemory(200 * CHUNK_BYTES, arena=arena), GpuTier(100 * CHUNK_BYTES, CPU)),
        cut=lambda ids, _: fixed(len(ids), CHUNK),
        origin=Origin("model"),
    )
    slab = Slab(SHAPE, num_pages=200, num_requests=4)
    holding = slab.take(CHUNK * CHUNKS + ANSWER)
    assert holding is not None
    packing = Packer(Quantizer(16, None)).packing(PagedKV(slab, holding))
    draw = np.random.default_rng(0)
    beginning = draw.integers(0, 30_000, CHUNK)

    def serve() -> tuple[float, float]:
        """Seconds for the prompt and for the answer."""
        rest = draw.integers(0, 30_000, CHUNK * (CHUNKS - 1) + ANSWER)
        ids = as_token_ids(np.concatenate([beginning, rest]))
        start = time.thread_time()
        store.admit(ROOT, ids, packing, exact_rows=len(ids), grows=True)
        middle = time.thread_time()
        store.admit(ROOT, ids, packing, exact_rows=len(ids))
        return middle - start, time.thread_time() - middle

    for _ in range(UNTIMED):
        serve()
    prompts, answers = zip(*(serve() for _ in range(requests)), strict=True)
    found = {
        "benchmark": "admission",
        "prompt_ms": statistics.median(prompts) * 1e3,
        "answer_ms": statistics.median(answers) * 1e3,
    }
    print(f"prompt {found['prompt_ms']:.2f} ms, answer {found['answer_ms']:.2f} ms")
    print(json.dumps(found))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
