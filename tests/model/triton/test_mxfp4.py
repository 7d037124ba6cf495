"""Experts in MXFP4 by our kernel, against the kernel for plain weights with the same numbers."""

from __future__ import annotations

import struct
from functools import partial

import pytest
import torch

from kvboost.model.quantized.mxfp4 import VALUES, Mxfp4Weight
from kvboost.model.triton import mxfp4
from kvboost.model.triton.experts import Tiles, Weights, limited_gate, mix
from kvboost.model.triton.mxfp4 import INSTRUCTIONS, PackedWeights, packed_tiles
from support.mxfp4 import random_blocks
from support.tiny import DEVICE

EXPERTS, HIDDEN, INNER = 5, 96, 160  # neither is a multiple of what a program reads at once
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
GATE = partial(limited_gate, alpha=1.702, limit=7.0)


def packed(outputs: int, inputs: int) -> Mxfp4Weight:
    return Mxfp4Weight.of(*random_blocks(EXPERTS, outputs, inputs), torch.device(DEVICE))


def of(weight: Mxfp4Weight, bias: torch.Tensor | None = None) -> PackedWeights:
    return PackedWeights(weight.codes, weight.scales, weight.depth, bias)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_packed_experts_give_what_expanded_ones_give(rows: int, dtype: torch.dtype) -> None:
    up, down = packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER)
    hidden = 8 * torch.randn(rows, HIDDEN, device=DEVICE, dtype=dtype)
    assert (hidden @ up.expanded(dtype)[0].t()).max() > 7, "the gate has something to limit"
    shares, chosen = torch.randn(rows, EXPERTS, device=DEVICE).softmax(-1).topk(2)
    biases = [torch.randn(EXPERTS, n, device=DEVICE, dtype=dtype) for n in (2 * INNER, HIDDEN)]
    ours = [of(weight, bias) for weight, bias in zip((up, down), biases, strict=True)]
    plain = [
        Weights(weight.expanded(dtype), bias)
        for weight, bias in zip((up, down), biases, strict=True)
    ]
    given = mix(hidden, chosen, shares.to(dtype), *ours, GATE)
    expected = mix(hidden, chosen, shares.to(dtype), *plain, GATE)
    assert given.dtype == dtype and expected.abs().max() > 1
    assert (given - expected).abs().max() <= LIMITS[dtype] * expected.abs().max()


@pytest.mark.parametrize(
    "tiles",
    {packed_tiles(pairs, 32, torch.bfloat16) for pairs in (4, 32, 999, 2000, 9999)},
    ids=str,
)
def test_tiles_of_any_size_give_the_same(tiles: Tiles) -> None:
    """One expert for all rows. Sums of a few small integers are exact, in any order."""
    blocks, scales = random_blocks(1, 200, 160)
    weight = Mxfp4Weight.of(blocks, torch.full_like(scales, 128), torch.device(DEVICE))
    rows = torch.zeros(20, 160).scatter_(1, torch.rand(20, 160).topk(8).indices, 1.0)
    rows = rows.to(DEVICE, torch.bfloat16)[: tiles.rows]
    pairs = torch.arange(tiles.rows, dtype=torch.int32, device=DEVICE)
    order = torch.where(pairs < len(rows), pairs, -1)
    blocks_of = mxfp4.Blocks(order, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    found = of(weight).product(
        rows, blocks_of, torch.zeros(len(rows), dtype=torch.int64), tiles, pairs_of_row=1
    )
    expected = rows.float() @ weight.expanded(torch.float32)[0].t()
    assert torch.equal(found, expected.bfloat16())


def test_every_code_is_read_at_every_place() -> None:
    """A row that is one at a single place gives the weights of that place."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(8)
    places = torch.stack([codes.roll(shift) for shift in range(16)])  # [16 outputs, 128 inputs]
    halves = places.view(16, 4, 16, 2)
    blocks = (halves[..., 0] | halves[..., 1] << 4)[None]
    scales = torch.tensor([[[127, 10, 128, 100]]], dtype=torch.uint8).expand(1, 16, 4).contiguous()
    weight = Mxfp4Weight.of(blocks, scales, torch.device(DEVICE))
    rows = torch.eye(128, device=DEVICE, dtype=torch.bfloat16)
    found = of(weight).product(
        rows,
        mxfp4.Blocks(
            torch.arange(128, dtype=torch.int32, device=DEVICE),
            torch.zeros(8, dtype=torch.int32, device=DEVICE),
        ),
        torch.zeros(128, dtype=torch.int64, device=DEVICE),
        Tiles(16, 64, 128, 4, 2),
        pairs_of_row=1,
    )
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    powers = 2.0 ** (scales[0].float() - 127)
    expected = values[places.long()] * powers.repeat_interleave(32, dim=1)
    assert torch.equal(found.t().float().cpu(), expected)


def test_the_instructions_for_gpus_make_the_same_numbers() -> None:
    """The interpreter does not run them, so this test does."""
    blocks, _ = random_blocks(1, 2, 128, seed=7)
    scales = torch.tensor([[[117, 127, 128, 1]]], dtype=torch.uint8).expand(1, 2, 4).contiguous()
    weight = Mxfp4Weight.of(blocks, scales, torch.device("cpu"))
    expected = weight.expanded(torch.float32)[0, 0].view(8, 16)
    words = [word & 0xFFFFFFFF for word in weight.codes[0, 0, 0].tolist()]
    factors = [(octet + 126 << 7) * 0x10001 for octet in (117, 127, 128, 1)]
    for at in range(0, 16, 2):
        given = [words[at], words[at + 1], *(each for each in factors for _ in range(2))]
        made = run_ptx(INSTRUCTIONS.value, given)
        for place in range(8):
            assert made[place] == expected[place, at : at + 2].tolist()


def run_ptx(text: str, given: list[int]) -> list[list[float]]:
    """Runs the few instructions that the text has: ``$8`` and so on are ``given``, and ``$0`` to
    ``$7`` come back, each as its two bfloat16 numbers."""
    registers = {f"${8 + number}": value for number, value in enumerate(given)}

    def value(name: str) -> int:
        return registers[name] if name in registers else int(name, 0)

    for line in text.strip("{}\n").split("\n"):
        kind, _, rest = line.rstrip(";").partition(" ")
        if kind == ".reg":
            continue
        to, *names = rest.split(", ")
        args = [value(name) for name in names]
        if kind == "prmt.b32":
            octets = struct.pack("<II", args[0], args[1])
            picked = bytes(octets[args[2] >> 4 * place & 7] for place in range(4))
            registers[to] = int.from_bytes(picked, "little")
        elif kind == "fma.rn.bf16x2":
            halves = zip(*(floats_in(arg) for arg in args), strict=True)
            sums = [left * right + more for left, right, more in halves]
            registers[to] = int.from_bytes(b"".join(map(bfloat16_of, sums)), "little")
        else:
            registers[to] = {
                "mov.b32": lambda a: a,
                "and.b32": lambda a, b: a & b,
                "or.b32": lambda a, b: a | b,
                "shl.b32": lambda a, b: a << b & 0xFFFFFFFF,
                "shr.b32": lambda a, b: a >> b,
            }[kind](*args)
    return [floats_in(registers[f"${number}"]) for number in range(8)]


def floats_in(word: int) -> list[float]:
    return [
        struct.unpack("<f", struct.pack("<I", half << 16))[0]
        for half in (word & 0xFFFF, word >> 16)
    ]


def bfloat16_of(value: float) -> bytes:
    octets = struct.pack("<f", value)
    assert not any(octets[:2]), "it is not rounded"
    return octets[2:]
