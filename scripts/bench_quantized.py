"""How fast products with quantised weights are on this machine, beside those with plain weights.

The shapes are those of Qwen2.5-1.5B. For each shape and number of rows, products with plain
weights (float32 weights that are bfloat16 numbers: two bytes each) and with quantised ones take
turns, so that a busy machine slows all of them. There are as many copies of each weight as are
needed to read them from memory, not from the caches, as a model does. It prints the median of the
rounds in microseconds, the gigabytes of weights that are read in a second, the billions of
multiplications in a second and the ratio to the plain product. With one thread, it counts the
processor's time, so that other programs matter less. The last line is JSON.

    python scripts/bench_quantized.py [--rounds 5] [--threads 1] [--rows 1 8] [--kinds q4-32 q6-16]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from kvboost.model import native
from kvboost.model.machine import copy_bandwidth
from kvboost.model.native.layers import Product
from kvboost.model.native.quantized_product import QuantizedProduct
from kvboost.model.quantized.weight import QuantizedWeight

SHAPES = ((1536, 1536), (8960, 1536), (1536, 8960))
KINDS = {
    "q4-32": (4, 32, True),
    "q4-32 centred": (4, 32, False),
    "q4-128": (4, 128, True),
    "q8-32": (8, 32, False),
    "q8-16": (8, 16, False),
    "q6-16": (6, 16, False),
}
"""Bits, group, and whether there are offsets of their own."""
MEMORY = 160 << 20
"""Copies of a weight take this much together: several times the caches."""

Serve = Callable[[torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["q4-32", "q6-16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library = native.library(torch.float32)
    kernels = library.kvboost_quantized_instructions().decode()
    print(
        f"{kernels}; {torch.get_num_threads()} threads; a copy in memory moves "
        f"{copy_bandwidth('cpu') / 1e9:.1f} GB/s"
    )
    found = []
    for n, k in SHAPES:
        contenders: dict[str, list[Product] | list[QuantizedProduct]] = {"plain": plain(n, k)}
        for kind in options.kinds:
            contenders[kind] = quantized(n, k, *KINDS[kind])
        for m in options.rows:
            found += measure(contenders, m, n, k, options.rounds)
    print(
        json.dumps(
            {
                "machine": platform.machine(),
                "kernels": kernels,
                "threads": options.threads,
                "products": found,
            }
        )
    )


def measure(
    contenders: dict[str, list[Product] | list[QuantizedProduct]],
    m: int,
    n: int,
    k: int,
    rounds: int,
) -> list[dict[str, object]]:
    rows = torch.randn(m, k)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first one warms up
        for name, products in contenders.items():
            taken = time_of(products, rows)
            if number:
                seconds.setdefault(name, []).append(taken)
    found: list[dict[str, object]] = []
    plain_time = statistics.median(seconds["plain"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        num_bytes = contenders[name][0].num_bytes
        found.append(
            {
                "n": n,
                "k": k,
                "rows": m,
                "kind": name,
                "us": round(middle * 1e6, 1),
                "gb_per_s": round(num_bytes / middle / 1e9, 1),
                "gmac_per_s": round(m * n * k / middle / 1e9),
                "to_plain": round(middle / plain_time, 3),
            }
        )
        print(
            f"{n:5} x {k:5}, {m:3} rows, {name:13}: {middle * 1e6:9.1f} us, "
            f"{num_bytes / middle / 1e9:5.1f} GB/s, {m * n * k / middle / 1e9:5.0f} GMAC/s, "
            f"{middle / plain_time:.2f} x plain",
            flush=True,
        )
    return found


def time_of(products: Sequence[Serve], rows: torch.Tensor) -> float:
    """Seconds of one product, of as many calls as there are copies."""
    some = products if len(rows) <= 16 else products[: max(1, len(products) // len(rows))]
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    started = clock()
    for product in some:
        product(rows)
    return (clock() - started) / len(some)


def plain(n: int, k: int) -> list[Product]:
    weight = torch.randn(n, k).bfloat16().float()
    return [Product(weight) for _ in range(MEMORY // (weight.numel() * 2) + 1)]


def quantized(n: int, k: int, bits: int, group: int, has_offsets: bool) -> list[QuantizedProduct]:
    scales = torch.rand(n, k // group).half()
    offsets = torch.randn(n, k // group).half() if has_offsets else None
    if bits == 4:
        codes = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
        offsets = scales * -8 if offsets is None else offsets
    else:
        codes = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k)).to(torch.int8)
    weight = QuantizedWeight(codes, scales, offsets, 4 if bits == 4 else 8, group)
    return [QuantizedProduct(weight) for _ in range(MEMORY // weight.nbytes + 1)]


if __name__ == "__main__":
    main()
