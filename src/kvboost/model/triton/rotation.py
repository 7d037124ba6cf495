"""Parts of kernels: the channels that rotate together."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def channels_of(pair, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two channels of each ``pair``: ``(i, i + PAIRS)``, or neighbours if ``INTERLEAVED``."""
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + PAIRS
    return first, second
