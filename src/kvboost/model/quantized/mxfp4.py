"""The weights of experts in MXFP4: numbers of 4 bits (e2m1), and a power of two for every 32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.errors import ModelError

BLOCK = 32
"""Numbers that share a scale."""
GROUP = 128
"""Numbers of one output whose codes a kernel reads at once: the eight codes of each of 16 words."""
WORDS = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the codes 0 to 7; those of 8 to 15 are the same below zero."""
SCALE_BIAS = 127
"""A scale is 2 to the power of its byte minus this."""
MOST_SCALE = 128
"""The largest byte of a scale that kernels can apply in bfloat16."""


def _places(code: int) -> tuple[int, ...]:
    """The four forms of a code in half a word: the sign bit, and the three others, which a shift
    and a mask bring to bit 15 and to the bits 8 to 6. There they are a bfloat16 number, which is
    2 ** 126 times too small."""
    sign, rest = code >> 3, code & 7
    return (
        sign << 15 | rest << 6,
        sign << 12 | rest << 3,
        sign << 9 | rest,
        sign << 14 | rest >> 1 << 10 | (rest & 1) << 13,
    )


@dataclass(frozen=True)
class Mxfp4Weight:
    """The weights ``[experts, n, k]`` of one product of all experts, in the order in which kernels
    read them. ``k`` is filled up with zeros to groups of 128.

    The word ``j`` of a group holds the numbers ``j``, ``16 + j``, ..., ``112 + j``: the first four
    in its low half. A program reads words of many outputs that are neighbours in memory, and gets
    the numbers of two words by one shift and one mask.
    """

    codes: torch.Tensor
    """int32 ``[experts, k / 128, n, 16]``."""
    scales: torch.Tensor
    """int32 ``[experts, k / 128, n]``: the four scales of a group, the first in the lowest byte."""
    depth: int
    """``k``."""

    @classmethod
    def of(cls, blocks: torch.Tensor, scales: torch.Tensor, device: torch.device) -> Mxfp4Weight:
        """From a checkpoint's uint8 ``blocks``, ``[experts, n, k / 32, 16]`` with even numbers in
        the low halves, and ``scales``, ``[experts, n, k / 32]``. Raises ModelError for scales that
        no kernel can apply."""
        experts, n, in_blocks, _ = blocks.shape
        groups = -(-in_blocks * BLOCK // GROUP)
        largest = int(scales.max())
        if largest > MOST_SCALE:
            raise ModelError(
                f"a scale of MXFP4 weights is 2**{largest - SCALE_BIAS}, and weights stay packed "
                f"up to 2**{MOST_SCALE - SCALE_BIAS}; use weights='plain'"
            )
        forms = torch.tensor([_places(code) for code in range(16)], dtype=torch.int32)
        table = torch.cat([forms, forms << 16], dim=1).t().contiguous().to(device)
        made = cls(
            torch.empty(experts, groups, n, WORDS, dtype=torch.int32, device=device),
            torch.empty(experts, groups, n, dtype=torch.int32, device=device),
            in_blocks * BLOCK,
        )
        missing = groups * GROUP // BLOCK - in_blocks
        for expert in range(experts):
            octets = blocks[expert].to(device)
            octets = torch.nn.functional.pad(octets, (0, 0, 0, missing))
            codes = torch.stack([octets & 15, octets >> 4], dim=-1).view(n, groups, 8, WORDS)
            words = torch.zeros(n, groups, WORDS, dtype=torch.int32, device=device)
            for place, form in enumerate(table):
                words |= form[codes[:, :, place].int()]
            made.codes[expert] = words.transpose(0, 1)
            of_expert = torch.nn.functional.pad(scales[expert].to(device), (0, missing))
            made.scales[expert] = of_expert.contiguous().view(torch.int32).t()
        return made

    @property
    def num_experts(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_experts, self.codes.shape[2], self.depth

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def expanded(self, dtype: torch.dtype) -> torch.Tensor:
        """``[experts, n, k]``. It is the reference for all kernels."""
        experts, n, depth = self.shape
        out = torch.empty(experts, n, depth, dtype=dtype, device=self.codes.device)
        for expert in range(experts):
            out[expert] = self._numbers(expert)[:, :depth]
        return out

    def _numbers(self, expert: int) -> torch.Tensor:
        """float32 ``[n, k]`` of an expert, with zeros at the end."""
        words = self.codes[expert].transpose(0, 1)
        halves = (words & 0xFFFF, (words >> 16) & 0xFFFF)
        codes = torch.stack([code for half in halves for code in _codes_in(half)], dim=2)
        values = torch.tensor([*VALUES, *(-value for value in VALUES)], device=words.device)
        n, groups = words.shape[:2]
        of_group = self.scales[expert].t()
        octets = torch.stack([of_group >> bit & 255 for bit in (0, 8, 16, 24)], dim=-1).flatten(1)
        powers = torch.ldexp(torch.ones_like(octets, dtype=torch.float32), octets - SCALE_BIAS)
        blocks = values[codes].view(n, groups * GROUP // BLOCK, BLOCK)
        return (blocks * powers[..., None]).view(n, groups * GROUP)


def _codes_in(half: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four codes in half a word: what ``_places`` made of them."""
    return (
        (half >> 12 & 8) | (half >> 6 & 7),
        (half >> 9 & 8) | (half >> 3 & 7),
        (half >> 6 & 8) | (half & 7),
        (half >> 11 & 8) | (half >> 9 & 6) | (half >> 13 & 1),
    )
