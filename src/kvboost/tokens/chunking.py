"""Where a sequence of tokens is cut into chunks."""

from __future__ import annotations


def fixed(num_tokens: int, chunk_size: int) -> list[tuple[int, int]]:
    """Intervals ``[start, end)`` on a grid of ``chunk_size``; the last one may be shorter."""
    return [
        (start, min(start + chunk_size, num_tokens)) for start in range(0, num_tokens, chunk_size)
    ]
