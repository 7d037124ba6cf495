"""Where the end of a text occurred before, and what followed it there. It handles no tensors.

A text that does not change is an ``IndexedText``: its n-grams, hashed and sorted. A request's own
text, which grows, is a ``GrowingText``: the indexed prompt, and a dictionary of the n-grams that
end in the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import TokenIds

SIZES = (8, 4, 2)
"""Tokens of the n-grams that are looked up, the longest first."""
LONGEST = 32
"""Longer matches are not told apart."""
LONG = 16
"""A match of so many tokens in a request's own text is taken without looking elsewhere."""
MOST_CANDIDATES = 16
"""Occurrences of an n-gram that are compared, the last ones of a text."""

Hashes = npt.NDArray[np.uint64]
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(29)
_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Match:
    """The last ``length`` tokens of a text occurred elsewhere; ``follows`` came next there."""

    length: int
    follows: list[int]


class Tail:
    """The last tokens of a text, with the hashes of the n-grams it ends in."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._last = ids[-LONGEST:]
        self.hashes = _last_hashes(self._last[-max(SIZES) :])
        """By size, the longest first."""

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._last, np.int64)


class IndexedText:
    """A text that does not change."""

    def __init__(self, ids: TokenIds | Sequence[int]) -> None:
        self.ids = np.asarray(ids, np.int64)
        self._sorted: dict[int, tuple[Hashes, npt.NDArray[np.intp]]] = {}

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, tail: Tail, most: int) -> Match | None:
        """The longest occurrence of the end of ``tail``, among equally long ones the last, with up
        to ``most`` tokens that follow; None if nothing occurs that at least one token follows."""
        if tail.hashes.get(SIZES[-1]) not in self._shortest:
            return None
        for size, number in tail.hashes.items():
            hashes, starts = self._index(size)
            hashed = np.uint64(number)
            first = hashes.searchsorted(hashed)
            if first == len(hashes) or hashes[first] != hashed:
                continue
            last = hashes.searchsorted(hashed, "right")
            ends = starts[max(first, last - MOST_CANDIDATES) : last] + size
            lengths = self._lengths(ends[ends < len(self.ids)], tail.ids)
            if len(lengths) and (longest := int(lengths.max())) >= size:
                place = int(ends[np.flatnonzero(lengths == longest)[-1]])
                return Match(longest, self.ids[place : place + most].tolist())
        return None

    @cached_property
    def _shortest(self) -> frozenset[int]:
        """The hashes of the shortest n-grams: most tails end in none of them."""
        return frozenset(hash_ngrams(self.ids, SIZES[-1]).tolist())

    def _index(self, size: int) -> tuple[Hashes, npt.NDArray[np.intp]]:
        """The hashes of all n-grams of ``size`` tokens in order, and where each begins."""
        if size not in self._sorted:
            hashes = hash_ngrams(self.ids, size)
            order = np.argsort(hashes, kind="stable")
            self._sorted[size] = hashes[order], order
        return self._sorted[size]

    def _lengths(
        self, ends: npt.NDArray[np.intp], tail: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """How many tokens before each of ``ends`` are the last ones of ``tail``."""
        places = ends[:, None] - np.arange(1, len(tail) + 1)
        same = (places >= 0) & (self.ids[np.maximum(places, 0)] == tail[::-1])
        lengths: npt.NDArray[np.int64] = np.logical_and.accumulate(same, axis=1).sum(1)
        return lengths


class GrowingText:
    """A prompt and the answer that grows after it."""

    def __init__(self, prompt: TokenIds) -> None:
        self.prompt = IndexedText(prompt)
        self.ids: list[int] = self.prompt.ids.tolist()
        self._ends: dict[tuple[int, ...], int] = {}
        """Where the n-grams that end in the answer ended last, if a token follows."""

    def push(self, token_id: int) -> None:
        for size in SIZES:
            if len(self.ids) >= size:
                self._ends[tuple(self.ids[-size:])] = len(self.ids)
        self.ids.append(token_id)

    def find(self, most: int, others: Sequence[IndexedText] = ()) -> Match | None:
        """The longest occurrence of the end of this text in itself or in ``others``. Among equally
        long ones, that in the answer goes before that in the prompt, and these before others, which
        are left out if the text itself has a long one."""
        tail = Tail(self.ids)
        found = [self._find_in_answer(most), self.prompt.find(tail, most)]
        if not any(match is not None and match.length >= LONG for match in found):
            found += [text.find(tail, most) for text in others]
        matches = [match for match in found if match is not None]
        return max(matches, key=lambda match: match.length, default=None)

    def _find_in_answer(self, most: int) -> Match | None:
        ids = self.ids
        for size in SIZES:
            end = self._ends.get(tuple(ids[-size:])) if len(ids) >= size else None
            if end is None:
                continue
            length = size
            while length < min(LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            follows: list[int] = []
            for place in range(end, end + most):  # what repeats itself may run into the draft
                follows.append(ids[place] if place < len(ids) else follows[place - len(ids)])
            return Match(length, follows)
        return None


def hash_ngrams(ids: npt.NDArray[np.int64], size: int) -> Hashes:
    """A hash of each n-gram of ``size`` tokens, a power of two."""
    empty = np.zeros(0, np.uint64)
    return next((hashes for width, hashes in _all_hashes(ids) if width == size), empty)


def _last_hashes(ids: Sequence[int]) -> dict[int, int]:
    """The hash of the last n-gram of each of ``SIZES``, the longest first. For so few tokens,
    Python's numbers are faster than arrays."""
    first, second, shift = int(_FIRST), int(_SECOND), int(_SHIFT)
    hashes = [(int(token) + 1) * first & _WORD for token in ids]
    found: dict[int, int] = {}
    width = 1
    while width * 2 <= len(ids):
        hashes = [
            (one * second ^ one >> shift ^ hashes[place + width] * first) & _WORD
            for place, one in enumerate(hashes[:-width])
        ]
        width *= 2
        if width in SIZES:
            found[width] = hashes[-1]
    return dict(reversed(found.items()))


def _all_hashes(ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, Hashes]]:
    """The hashes of all n-grams of 1, 2, 4, … tokens, as far as there are any."""
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * _FIRST
    width = 1
    while len(hashes):
        yield width, hashes
        hashes = hashes[:-width] * _SECOND ^ (hashes[:-width] >> _SHIFT) ^ hashes[width:] * _FIRST
        width *= 2
