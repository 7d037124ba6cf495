"""Compiles the Triton kernels for a GPU, which need not be there, and prints their names. The
interpreter accepts more than the compiler does.

    python tests/support/compile_kernels.py
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvboost.model.triton import (
    adapters,
    attention,
    codes,
    dense,
    experts,
    fused,
    mass,
    move,
    mxfp4,
    shift,
    take,
    write,
)

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    "": "query pages like keys values out qkv gate_up rows added summed weight bias past own down "
    "up query_norm key_norm sinks",
    "i32": "positions items tiles tables table counted fresh bounds stale num_stale num_spans",
    "i64": "sources slots addresses adapters",
    "fp32": "lse past_lse own_lse parts part_lse mass cos sin angles weights offsets sums",
    "u8": "absent",
    "i8": "codes",
    "fp16": "scales",
}
"""What each pointer points to; if it is empty, the numbers that a kernel is compiled for."""
SIZES = {
    "KV_HEADS": 2, "GROUP": 3, "HEADS": 6, "PARTS": 32, "ROWS": 16, "KEYS": 16, "PAGE": 16,
    "DIM": 24, "WIDE": 32, "PAIRS": 10, "WIDE_PAIRS": 16, "HALF": 12, "SECOND": 12, "WIDTH": 24,
    "BLOCKS": 8, "WIDE_BLOCKS": 16, "BLOCK": 16, "ALIGN": 16, "RANKS": 16, "PADDED": 32,
    "COLUMNS": 32, "DEPTH": 128, "EXPANDED": 1024,
    "INTERLEAVED": False, "OFFSETS": False, "BIAS": True, "JOINED": False, "ROTATED": 0,
    "TURNS": 16,
}  # fmt: skip
IN_PAGES = {"whole": None, "turns": None, "keys": None, "values": None, "dense_rows": 0}
TILE = "tensordesc<bf16[16, 32]>"
WHOLE_PAGES = {**IN_PAGES, "whole": TILE, "DIM": 32}
LATENTS = {
    "ROTATED": 64, "TURNS": 64, "DIM": 512, "WIDE": 512, "KEYS": 32, "PAGE": 64, "GROUP": 16,
    "WARPS": 8,
}  # fmt: skip
PAGES_OF_LATENTS = {
    **IN_PAGES,
    **LATENTS,
    "whole": "tensordesc<bf16[64, 512]>",
    "turns": "tensordesc<bf16[64, 64]>",
    "KEYS": 64,
    "ROWS": 64,
}
DENSE = {"turns": None, "whole": None, "keys": TILE, "values": TILE, "DIM": 32}
ALL_KEYS = dict.fromkeys(("absent", "window", "cap", "sinks", "lse"))
ADAPTED = {"SPLITS": 3, "PADDED": 4, "RANKS": 16}
PLAIN = {**dict.fromkeys(("sums", "adapters", "up", "rank", "split_stride")), "RANKS": 1}
ORDERED = {"EXPERTS": 32, "PAIRS": 256, "SLOTS": 1024, "BLOCKS": 64, "AT_ONCE": 16}
OF_EXPERTS = {"chosen": "*i64", "order": "*i32", "experts": "*i32", "starts": "*i32"}
PRODUCT = {
    "WIDTH": 2880,
    "DEPTH": 2880,
    "CHOSEN": 4,
    "COLUMNS": 64,
    "AT_ONCE": 128,
    "GROUP": 8,
    **OF_EXPERTS,
    "weights": "*bf16",
    "biases": "*bf16",
    "shares": "*bf16",
}
IN_MXFP4 = {**PRODUCT, "K": 2880, "words": "*i32", "scales": "*i32", "PTX": True}
EXACT = {"weights": "*fp32", "biases": None, "shares": None, "AT_ONCE": 32}
VARIANTS: list[tuple[Any, str, dict[str, Any]]] = [
    (adapters._shrink_kernel, "bf16", {}),
    (adapters._expand_kernel, "bf16", {}),
    (fused._add_norm_kernel, "bf16", ADAPTED),
    (fused._gate_kernel, "bf16", {**ADAPTED, "RANKS": 64}),
    (fused._rotate_write_kernel, "bf16", {**ADAPTED, "query_norm": None, "key_norm": None}),
    (fused._rotate_write_kernel, "bf16", {**ADAPTED, "ROWS": 1}),
    (fused._add_norm_kernel, "bf16", PLAIN),
    (fused._add_norm_kernel, "fp32", {**PLAIN, "added": None, "summed": None}),
    (fused._rotate_write_kernel, "fp32", {**PLAIN, "query_norm": None, "key_norm": None}),
    (fused._gate_kernel, "bf16", PLAIN),
    (experts._order_kernel, "bf16", {**ORDERED, **OF_EXPERTS}),
    (experts._product_kernel, "bf16", PRODUCT),
    (experts._product_kernel, "bf16", {**PRODUCT, "order": None, "experts": "*i64"}),
    (experts._product_kernel, "fp32", {**PRODUCT, **EXACT}),
    (mxfp4._packed_product_kernel, "bf16", IN_MXFP4),
    (mxfp4._packed_product_kernel, "bf16", {**IN_MXFP4, "order": None, "experts": "*i64"}),
    (mxfp4._packed_product_kernel, "fp32", {**IN_MXFP4, **EXACT, "PTX": False}),
    (experts._limited_gate_kernel, "bf16", {"alpha": "fp32", "limit": "fp32", "BLOCK": 1024}),
    (attention._attend_kernel, "bf16", {**ALL_KEYS, **IN_PAGES}),
    (attention._attend_kernel, "bf16", {**ALL_KEYS, **WHOLE_PAGES}),
    (attention._attend_kernel, "bf16", {**ALL_KEYS, **DENSE}),
    (attention._attend_kernel, "fp32", {"parts": None, "part_lse": None, **IN_PAGES}),
    (attention._attend_kernel, "bf16", {**ALL_KEYS, **IN_PAGES, **LATENTS}),
    (attention._attend_kernel, "bf16", {**ALL_KEYS, **PAGES_OF_LATENTS}),
    (attention._combine_kernel, "bf16", {}),
    (write._write_kernel, "bf16", {}),
    (dense._gather_kernel, "bf16", {"counted": None}),
    (dense._merge_kernel, "bf16", {}),
    (fused._rotate_write_kernel, "bf16", {**PLAIN, "ROWS": 1}),
    (mass._mass_kernel, "bf16", {}),
    (mass._mass_kernel, "bf16", {**LATENTS, "KV_HEADS": 1, "cap": None, "window": None}),
    (move._move_kernel, "fp32", {"INTERLEAVED": True}),
    (move._move_kernel, "bf16", {"share": None}),
    (take._take_kernel, "bf16", {"items": "*i64", "table": "*i64"}),
    (shift._errors_kernel, "fp32", {"INTERLEAVED": True}),
    (shift._errors_kernel, "bf16", {"JOINED": True}),
    (shift._shift_kernel, "bf16", {}),
    (codes._multiply_kernel, "bf16", {"BITS": 8, "GROUP": 16, "BIAS": False}),
    (codes._multiply_kernel, "bf16", {"BITS": 4, "GROUP": 32, "OFFSETS": True}),
    (codes._expand_kernel, "bf16", {"BITS": 4, "GROUP": 32, "OFFSETS": True}),
]


def type_of(name: str, number: str) -> str:
    for pointed, names in TYPES.items():
        if name in names.split():
            return f"*{pointed or number}"
    return "fp32" if name in ("scale", "cap", "eps", "share", "error_weight") else "i32"


def compile_kernel(kernel: Any, number: str, given: dict[str, Any]) -> None:
    names = [parameter.name for parameter in kernel.params]
    types = {name: value for name, value in given.items() if isinstance(value, str)}
    known = {**SIZES, **given}.items()
    constants = {name: value for name, value in known if name in names and name not in types}
    signature = {
        name: "constexpr" if name in constants else types.get(name) or type_of(name, number)
        for name in names
    }
    source = ASTSource(
        kernel, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    warps = given.get("WARPS", 4)
    triton.compile(source, target=HOPPER, options={"num_warps": warps, "num_stages": 2})
    print(kernel.__name__, number)


if __name__ == "__main__":
    for variant in VARIANTS:
        compile_kernel(*variant)
