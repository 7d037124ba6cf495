"""Cutting a sequence of tokens into chunks."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kvboost.config import one_of, whole
from kvboost.errors import ConfigError
from kvboost.tokens.hashing import TokenIds

Interval = tuple[int, int]
Decode = Callable[[Sequence[int]], str]
SHORTEST_DOCUMENT = 8
"""A shorter document joins the next one: it would make too small a chunk."""
_SENTENCE_END = re.compile(r"""[.!?…。！？]["'“”’»)\]}」』）】]*\s*\Z""")


def fixed(num_tokens: int, chunk_size: int) -> list[Interval]:
    """Intervals ``[start, end)`` on a grid of ``chunk_size``; the last one may be shorter."""
    return [
        (start, min(start + chunk_size, num_tokens)) for start in range(0, num_tokens, chunk_size)
    ]


class Cutter:
    """Cuts a sequence of tokens into chunks.

    ``fixed``
        Every ``chunk_size`` tokens.
    ``semantic``
        At the first end of a sentence or line from ``chunk_size // 2`` tokens on, at the latest
        after ``chunk_size``.
    ``document``
        After the token in which a marker ends. A document longer than ``chunk_size`` is cut every
        ``chunk_size`` tokens from its own beginning, so it is cut alike at any position. One
        shorter than ``SHORTEST_DOCUMENT`` joins the next.

    Only the tokens before a cut decide it, never the tokens after it. So when a sequence grows, all
    its chunks but the last stay the same. The prefix tree relies on that.

    Each id is decoded alone, once, when it is first seen. Some tokenizers drop a lone token's
    leading space, so spaces do not count when markers are compared: a line of spaces is a blank
    line. A character that is split over tokens has no text and matches nothing.

    Thread-safe.
    """

    def __init__(
        self,
        strategy: str,
        chunk_size: int,
        decode: Decode,
        vocab_size: int,
        markers: Sequence[str] = ("\n\n",),
    ) -> None:
        strategies: dict[str, Callable[[TokenIds], list[Interval]]] = {
            "fixed": lambda token_ids: fixed(len(token_ids), chunk_size),
            "semantic": self._semantic,
            "document": self._document,
        }
        one_of(strategy, tuple(strategies), "chunking")
        whole(chunk_size, 1, "chunk_size")
        self._cut = strategies[strategy]
        self._chunk_size = chunk_size
        self._markers = _check_markers(markers)
        self._ends_sentence = _PerToken(decode, vocab_size, _ends_sentence, bool)
        self._texts = _PerToken(decode, vocab_size, _without_spaces, object)

    def __call__(self, token_ids: TokenIds, boundaries: Sequence[int] = ()) -> list[Interval]:
        """Intervals ``[start, end)`` that cover all tokens in order, 1 to ``chunk_size`` in each.
        None crosses one of the ``boundaries``: the tokens between two are cut on their own."""
        inside = {place for place in boundaries if 0 < place < len(token_ids)}
        return [
            (begin + start, begin + end)
            for begin, stop in pairwise([0, *sorted(inside), len(token_ids)])
            for start, end in self._cut(token_ids[begin:stop])
        ]

    def _semantic(self, token_ids: TokenIds) -> list[Interval]:
        ends: list[int] = (np.flatnonzero(self._ends_sentence(token_ids)) + 1).tolist()
        shortest = max(1, self._chunk_size // 2)
        intervals = []
        start = 0
        while start < len(token_ids):
            end = min(start + self._chunk_size, len(token_ids))
            nearest = bisect_left(ends, start + shortest)
            if nearest < len(ends):
                end = min(end, ends[nearest])
            intervals.append((start, end))
            start = end
        return intervals

    def _document(self, token_ids: TokenIds) -> list[Interval]:
        bounds = [0, *self._document_ends(token_ids), len(token_ids)]
        return [
            (begin + start, begin + end)
            for begin, stop in pairwise(bounds)
            for start, end in fixed(stop - begin, self._chunk_size)
        ]

    def _document_ends(self, token_ids: TokenIds) -> list[int]:
        """The tokens before which a new document begins."""
        pieces = self._texts(token_ids)
        text = "".join(pieces)
        text_ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        # In the order in which they end; the lookahead finds overlapping markers too.
        found = sorted(
            (hit.start() + len(marker), hit.start())
            for marker in self._markers
            for hit in re.finditer(f"(?={re.escape(marker)})", text)
        )
        token_ends = np.searchsorted(text_ends, [end for end, _ in found]) + 1
        ends = []
        begin, text_begin = 0, 0
        for (_, marker_start), end in zip(found, token_ends.tolist(), strict=True):
            # A marker lies inside one document: the text before must not change how it is cut.
            if end - begin >= SHORTEST_DOCUMENT and marker_start >= text_begin:
                ends.append(end)
                begin, text_begin = end, int(text_ends[end - 1])
        return ends


class _PerToken:
    """A value for each token id, found by decoding the id alone when it is first seen.

    Thread-safe: threads that meet the same new id write the same value before they mark it seen.
    """

    def __init__(
        self, decode: Decode, vocab_size: int, value: Callable[[str], object], dtype: npt.DTypeLike
    ) -> None:
        self._decode = decode
        self._value = value
        # The last entry is for what has no text: rows of images.
        self._values: npt.NDArray[Any] = np.empty(vocab_size + 1, dtype)
        self._seen = np.zeros(vocab_size + 1, bool)
        self._values[-1], self._seen[-1] = value(""), True

    def __call__(self, token_ids: TokenIds) -> npt.NDArray[Any]:
        token_ids = np.minimum(token_ids, len(self._values) - 1)
        for token_id in np.unique(token_ids[~self._seen[token_ids]]).tolist():
            self._values[token_id] = self._value(self._decode([token_id]))
            self._seen[token_id] = True
        return self._values[token_ids]


def _ends_sentence(text: str) -> bool:
    return "\n" in text or _SENTENCE_END.search(text) is not None


def _without_spaces(text: str) -> str:
    return text.replace(" ", "")


def _check_markers(markers: Sequence[str]) -> tuple[str, ...]:
    if isinstance(markers, str):
        raise ConfigError(f"markers={markers!r} is one string; give a list, [{markers!r}]")
    compact = tuple(map(_without_spaces, markers))
    if not compact or not all(compact):
        said = f"markers={markers!r} must be strings that are more than spaces, at least one"
        raise ConfigError(said)
    return compact
