"""What a cache secret costs: chunks read and written with a checksum, and with a keyed MAC.

Both are measured in turn, in CPU time of one thread, so other work on the machine matters little.

    python scripts/bench_secret.py
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.quantize import plain
from kvboost.cache.secret import Secret
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key

ROUNDS = 15


def make_chunk(secret: Secret | None) -> KVChunk:
    """128 tokens of SmolLM2-135M in bfloat16, drawn."""
    naming = b"" if secret is None else secret.naming
    data = plain(torch.randn(2, 30, 3, 128, 64).bfloat16())
    ids = as_token_ids(range(128))
    root = root_key("model", "", secret=naming)
    info = ChunkInfo(
        key=chain_key(root, ids, secret=naming),
        parent=root,
        before=root,
        root=root,
        token_ids=ids,
        base_position=0,
        lineage=Lineage.EXACT,
        bits=16,
        nbytes=data.nbytes,
        origin=Origin("model"),
        signed=secret is not None,
    )
    return KVChunk(info, data)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    size = 0
    with tempfile.TemporaryDirectory() as folder:
        cases = {"checksum": None, "mac": Secret("a secret for measuring")}
        chunks = {name: make_chunk(secret) for name, secret in cases.items()}
        for name, secret in cases.items():
            Path(folder, name).write_bytes(codec.encode(chunks[name], secret))
        for _ in range(ROUNDS):
            for name, secret in cases.items():
                path, chunk = Path(folder, name), chunks[name]
                size = chunk.nbytes
                read = seconds(
                    lambda path=path, secret=secret: codec.read_file(path, secret=secret)
                )
                write = seconds(lambda chunk=chunk, secret=secret: codec.encode(chunk, secret))
                times.setdefault(f"read_{name}", []).append(read)
                times.setdefault(f"write_{name}", []).append(write)
    speeds = {name: size / statistics.median(some) / 1e9 for name, some in times.items()}
    print(json.dumps({"gb_per_cpu_second": {name: round(x, 2) for name, x in speeds.items()}}))


if __name__ == "__main__":
    main()
