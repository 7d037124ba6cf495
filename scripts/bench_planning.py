"""How long it takes to plan a prompt against a full cache: matching alone, without a model.

    python scripts/bench_planning.py [chunks] [prompt tokens]

Ten thousand chunks of 128 tokens and a prompt of 8,192, unless said otherwise. Prints medians of
what ``ChunkStore.lookup`` and the choice of spans take in several situations; JSON comes last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import numpy as np
import torch

from kvboost.cache.chunk import Origin
from kvboost.cache.quantize import plain
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.reuse.plan import make_plan
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import TokenIds, as_token_ids, root_key

CHUNK = 128
ROOT = root_key("model", "")
ROUNDS = 15


class Shelf:
    """A store whose chunks hold no KV to speak of."""

    def __init__(self) -> None:
        self.store = ChunkStore(
            Tiers(RamTier(1 << 40)),
            cut=lambda ids, _: fixed(len(ids), CHUNK),
            origin=Origin("model"),
        )

    def admit(self, ids: TokenIds) -> None:
        self.store.admit(
            ROOT,
            ids,
            lambda parts: [plain(torch.empty(2, 1, 1, p.end - p.start, 1)) for p in parts],
            exact_rows=len(ids),
        )


def main(num_chunks: int = 10_000, prompt_tokens: int = 8_192) -> None:
    draw = np.random.default_rng(0)

    def text(num_tokens: int) -> TokenIds:
        return as_token_ids(draw.integers(0, 50_000, num_tokens))

    def join(*parts: TokenIds) -> TokenIds:
        return as_token_ids(np.concatenate(parts)[:prompt_tokens])

    documents = [text(2_048) for _ in range(num_chunks * CHUNK // 2_048)]
    shelf = Shelf()
    for document in documents:
        shelf.admit(document)
    shared = Shelf()  # the same 60 passages in hundreds of requests, each in another order
    passages = [text(256) for _ in range(60)]
    for _ in range(num_chunks * CHUNK // (8 * 256)):
        order = draw.permutation(len(passages))[:8]
        shared.admit(join(text(17), *(passages[number] for number in order)))
    scattered = [
        documents[n][start : start + 250]
        for n, start in zip(
            draw.integers(0, len(documents), 40), draw.integers(0, 1_700, 40), strict=True
        )
    ]
    situations = {
        "nothing known": (shelf, text(prompt_tokens)),
        "one document, moved": (shelf, join(text(77), documents[5], text(prompt_tokens))),
        "four documents in another order": (
            shelf,
            join(text(77), *(documents[n] for n in (9, 3, 12, 6))),
        ),
        "40 passages of 250 from anywhere": (shelf, join(text(77), *scattered)),
        "30 passages, each with many donors": (shared, join(text(77), *passages[:30], text(500))),
    }
    print(f"{num_chunks:,} chunks of {CHUNK} tokens, a prompt of {prompt_tokens:,}")
    times = {}
    for name, (known_to, ids) in situations.items():
        seconds = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            with known_to.store.lookup(ROOT, ids, moved_before=len(ids) - 16, pin=False) as known:
                plan = make_plan(len(ids), known)
            seconds.append(time.perf_counter() - start)
        times[name] = statistics.median(seconds) * 1e3
        print(f"  {name:36} {times[name]:6.2f} ms  {plan.num_moved:6,} tokens moved")
    print(json.dumps({"benchmark": "planning", "chunks": num_chunks, "median_ms": times}))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
