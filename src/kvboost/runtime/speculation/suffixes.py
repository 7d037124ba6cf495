"""Where the end of a text occurred before, and what followed it there. It handles no tensors.

A text that does not change is an ``IndexedText``: its n-grams, hashed and sorted. A request's own
text, which grows, is a ``GrowingText``: the indexed prompt, and a dictionary of the n-grams that
end in the answer. ``TenantTexts`` are those that requests have read and written lately.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvboost.tokens.hashing import ChunkKey, TokenIds

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


@dataclass(frozen=True)
class Occurrence:
    """The last ``length`` tokens of a text are also those before ``end`` of ``ids``, where at least
    one token follows them."""

    length: int
    end: int
    ids: Sequence[int] | npt.NDArray[np.int64]

    def next(self, token_id: int) -> Occurrence | None:
        """The same once the text has got another token, which has followed there as well; None if
        it has not."""
        if self.end + 1 >= len(self.ids) or self.ids[self.end] != token_id:
            return None
        return Occurrence(min(self.length + 1, LONGEST), self.end + 1, self.ids)


class Tail:
    """The last tokens of a text, and the hashes of the n-grams it ends in."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._last = ids[-LONGEST:]
        self._hashes: dict[int, int | None] = {}

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.asarray(self._last, np.int64)

    def hash(self, size: int) -> int | None:
        """That of the last n-gram of ``size`` tokens; None if there are fewer."""
        if size not in self._hashes:
            self._hashes[size] = _last_hash(self._last[-size:], size)
        return self._hashes[size]


class IndexedText:
    """A text that does not change."""

    def __init__(self, ids: TokenIds | Sequence[int]) -> None:
        self.ids = np.asarray(ids, np.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, tail: Tail, longer_than: int = 0) -> Occurrence | None:
        """The longest occurrence of the end of ``tail``, among equally long ones the last; None if
        there is none of more than ``longer_than`` tokens that at least one token follows."""
        if tail.hash(SIZES[-1]) not in self._shortest:
            return None
        longest = LONGEST
        for size in SIZES:
            if longest <= longer_than:
                break
            longest = size - 1  # of an occurrence that is not found by so many tokens
            number = tail.hash(size)
            if number is None:
                continue
            hashes, starts = self._index[size]
            hashed = np.uint64(number)
            first = hashes.searchsorted(hashed)
            if first == len(hashes) or hashes[first] != hashed:
                continue
            last = hashes.searchsorted(hashed, "right")
            ends = starts[max(first, last - MOST_CANDIDATES) : last] + size
            lengths = self._lengths(ends[ends < len(self.ids)], tail.ids)
            if len(lengths) and (length := int(lengths.max())) >= size:
                end = int(ends[np.flatnonzero(lengths == length)[-1]])
                return Occurrence(length, end, self.ids) if length > longer_than else None
        return None

    @cached_property
    def _shortest(self) -> frozenset[int]:
        """The hashes of the shortest n-grams: most tails end in none of them."""
        return frozenset(hash_ngrams(self.ids, SIZES[-1]).tolist())

    @cached_property
    def _index(self) -> dict[int, tuple[Hashes, npt.NDArray[np.intp]]]:
        """The hashes of all n-grams of each of ``SIZES`` in order, and where each begins."""
        index = dict.fromkeys(SIZES, (np.zeros(0, np.uint64), np.zeros(0, np.intp)))
        for size, hashes in _all_hashes(self.ids):
            if size in SIZES:
                order = np.argsort(hashes, kind="stable")
                index[size] = hashes[order], order
        return index

    def _lengths(
        self, ends: npt.NDArray[np.intp], tail: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """How many tokens before each of ``ends`` are the last ones of ``tail``."""
        places = ends[:, None] - np.arange(1, len(tail) + 1)
        same = (places >= 0) & (self.ids[np.maximum(places, 0)] == tail[::-1])
        lengths: npt.NDArray[np.int64] = np.logical_and.accumulate(same, axis=1).sum(1)
        return lengths


class GrowingText:
    """A prompt and the answer that grows after it. ``others`` are looked through as well."""

    def __init__(self, prompt: TokenIds, others: Sequence[IndexedText] = ()) -> None:
        self._others = others
        self.prompt = IndexedText(prompt)
        self.ids: list[int] = self.prompt.ids.tolist()
        self._ends: dict[tuple[int, ...], int] = {}
        """Where the n-grams that end in the answer ended last, if a token follows."""
        self._found: Occurrence | None = None
        """The occurrence that was found last, as long as the text continues as it did there. Then
        no other occurrence is longer, unless it was not seen before: it would have been longer
        then."""

    def push(self, token_id: int) -> None:
        for size in SIZES:
            if len(self.ids) >= size:
                self._ends[tuple(self.ids[-size:])] = len(self.ids)
        self.ids.append(token_id)
        if self._found is not None:
            self._found = self._found.next(token_id)

    def find(self, most: int) -> Match | None:
        """The longest occurrence of the end of this text in itself or in others, with up to
        ``most`` tokens that follow. Among equally long ones, that in the answer goes before that in
        the prompt, and these before others, which are left out if the text itself has a long
        one."""
        if self._found is None:
            self._found = self._look()
        found = self._found
        return None if found is None else Match(found.length, self._follows(found, most))

    def _look(self) -> Occurrence | None:
        tail = Tail(self.ids)
        best = self._find_in_answer()
        for text in (self.prompt, *self._others):
            length = 0 if best is None else best.length
            if text is not self.prompt and length >= LONG:
                break
            best = text.find(tail, longer_than=length) or best
        return best

    def _find_in_answer(self) -> Occurrence | None:
        ids = self.ids
        for size in SIZES:
            end = self._ends.get(tuple(ids[-size:])) if len(ids) >= size else None
            if end is None:
                continue
            length = size
            while length < min(LONGEST, end) and ids[end - length - 1] == ids[-length - 1]:
                length += 1
            return Occurrence(length, end, ids)
        return None

    def _follows(self, found: Occurrence, most: int) -> list[int]:
        some = found.ids[found.end : found.end + most]
        follows: list[int] = some.tolist() if isinstance(some, np.ndarray) else list(some)
        if found.ids is self.ids:  # what repeats itself may run into the draft
            period = len(self.ids) - found.end
            for place in range(len(follows), most):
                follows.append(follows[place - period])
        return follows


def hash_ngrams(ids: npt.NDArray[np.int64], size: int) -> Hashes:
    """A hash of each n-gram of ``size`` tokens, a power of two."""
    empty = np.zeros(0, np.uint64)
    return next((hashes for width, hashes in _all_hashes(ids) if width == size), empty)


def _last_hash(ids: Sequence[int], size: int) -> int | None:
    """The hash of ``size`` tokens, a power of two. For so few, Python's numbers are faster than
    arrays."""
    if len(ids) < size:
        return None
    first, second, shift = int(_FIRST), int(_SECOND), int(_SHIFT)
    hashes = [(int(token) + 1) * first & _WORD for token in ids]
    while len(hashes) > 1:
        pairs = zip(hashes[::2], hashes[1::2], strict=True)
        hashes = [(one * second ^ one >> shift ^ other * first) & _WORD for one, other in pairs]
    return hashes[0]


def _all_hashes(ids: npt.NDArray[np.int64]) -> Iterator[tuple[int, Hashes]]:
    """The hashes of all n-grams of 1, 2, 4, … tokens, as far as there are any."""
    hashes = (ids.astype(np.uint64) + np.uint64(1)) * _FIRST
    width = 1
    while len(hashes):
        yield width, hashes
        hashes = hashes[:-width] * _SECOND ^ (hashes[:-width] >> _SHIFT) ^ hashes[width:] * _FIRST
        width *= 2


MOST_TEXTS = 8
"""Texts of one tenant."""
MOST_TOKENS = 32 * 1024
"""Tokens of them, all together; the newest text is kept in any case, up to its last so many."""
MOST_TENANTS = 64


class TenantTexts:
    """Thread-safe. Tenants are told apart by the roots of their caches: a draft from another's text
    would tell, by its speed, what that text says. Everything goes when the store forgets anything,
    which changes its ``epoch``."""

    def __init__(self) -> None:
        self._texts: OrderedDict[ChunkKey, list[IndexedText]] = OrderedDict()
        self._epoch = 0
        self._lock = threading.Lock()

    def add(self, root: ChunkKey, ids: TokenIds, epoch: int) -> None:
        """Keeps a text in place of those that it continues, unless something was forgotten after
        ``epoch``, at which it was begun."""
        text = IndexedText(ids[-MOST_TOKENS:])
        with self._lock:
            if epoch < self._epoch:
                return
            self._follow(epoch)
            texts = [old for old in self._texts.get(root, ()) if not _continues(text, old)]
            texts.append(text)
            while len(texts) > MOST_TEXTS or sum(map(len, texts)) > MOST_TOKENS:
                texts.pop(0)
            self._texts[root] = texts
            self._texts.move_to_end(root)
            if len(self._texts) > MOST_TENANTS:
                self._texts.popitem(last=False)

    def of(self, root: ChunkKey, epoch: int) -> list[IndexedText]:
        """The texts of one tenant, the newest first; ``epoch`` is that of the store."""
        with self._lock:
            self._follow(epoch)
            return self._texts.get(root, [])[::-1]

    def _follow(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._texts.clear()
            self._epoch = epoch


def _continues(text: IndexedText, old: IndexedText) -> bool:
    length = len(old)
    if length > len(text) or (length and text.ids[length - 1] != old.ids[-1]):
        return False
    return np.array_equal(text.ids[:length], old.ids)
