"""Measures of how close an answer is, and how sure a mean is."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def f1(answer: str, references: Sequence[str]) -> float:
    """SQuAD's token F1 against the reference that fits best, between 0 and 1.

    Case, punctuation and articles do not count, nor does the order of the words.
    """
    words = _words(answer)
    return max(_overlap(words, _words(reference)) for reference in references)


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L's F1 between 0 and 1: how much of both texts is one sequence of words that both have
    in this order. Case and punctuation do not count."""
    one, other = (re.findall(r"\w+", text.lower()) for text in (answer, reference))
    if not one or not other:
        return float(one == other)
    return 2 * _common_length(one, other) / (len(one) + len(other))


def edit_similarity(answer: str, reference: str) -> float:
    """One less the characters that must be added, removed or replaced to get from one text to the
    other (Levenshtein), as a share of the longer text."""
    longer = max(len(answer), len(reference))
    return 1 - _edits(answer, reference) / longer if longer else 1.0


def paired_bootstrap(
    differences: Sequence[float], *, rounds: int = 2000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """The interval that holds the mean of ``differences`` in ``level`` of the resampled rounds.

    Each difference is that of one pair, so what makes a question hard cancels out.
    """
    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        raise ValueError("no differences to resample; give at least one")
    picks = np.random.default_rng(seed).integers(values.size, size=(rounds, values.size))
    tail = (1 - level) / 2
    low, high = np.quantile(values[picks].mean(axis=1), [tail, 1 - tail])
    return float(low), float(high)


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _overlap(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return 2 * common / (len(answer) + len(reference))


def _common_length(one: Sequence[str], other: Sequence[str]) -> int:
    """Words of the longest common subsequence."""
    above = [0] * (len(other) + 1)
    for word in one:
        row = [0]
        for at, same in enumerate(other):
            row.append(above[at] + 1 if word == same else max(above[at + 1], row[at]))
        above = row
    return above[-1]


def _edits(one: str, other: str) -> int:
    """Levenshtein's distance, a row of its table at a time."""
    letters = np.array([ord(letter) for letter in other])
    at = np.arange(len(other) + 1)
    row = at
    for number, letter in enumerate(one, start=1):
        kept = np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))
        # What is left is to add letters, each for one.
        row = np.minimum.accumulate(np.concatenate(([number], kept)) - at) + at
    return int(row[-1])
