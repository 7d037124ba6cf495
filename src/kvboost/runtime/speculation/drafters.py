"""Where drafts come from: the text that was read, or a small model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from kvboost.runtime.speculation.suffixes import GrowingText, IndexedText
from kvboost.tokens.hashing import TokenIds

EXPECTED = {2: 0.4, 3: 0.5, 4: 0.6, 6: 0.7, 9: 0.8, 17: 0.9}
"""How likely the next token follows after a match of at least so many tokens, until it has been
measured."""


class Kind(NamedTuple):
    """Drafted tokens of one kind are about equally likely right, if all before them were."""

    name: Hashable
    expected: float
    """The chance that a token is accepted, until some of this kind have been seen."""


@dataclass(frozen=True)
class Offer:
    """The tokens that a drafter could draft."""

    kinds: Sequence[Kind]
    """Those of the tokens that it has, in order."""
    seconds: float = 0.0
    """How long drafting one token takes."""


class Drafter(Protocol):
    """Drafts the next tokens of one request. Called by one thread."""

    def push(self, token_ids: Sequence[int]) -> None:
        """Tokens that the answer has got."""

    def offer(self, most: int) -> Offer | None:
        """The tokens that it could draft now, ``most`` of them at most; None if there are none."""

    def draft(self, count: int) -> list[int]:
        """The first tokens, up to ``count``, of what it has offered."""

    def foresees(self) -> list[int]:
        """The tokens that it would draft, if it knows them without any work."""


class TextDrafter:
    """Drafts what followed when the last tokens occurred before: in the prompt, in the answer, or
    in ``others``, the tenant's last texts."""

    def __init__(self, prompt: TokenIds, others: Sequence[IndexedText] = ()) -> None:
        self._text = GrowingText(prompt, others)
        self._follows: list[int] = []

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._text.push(token_id)

    def offer(self, most: int) -> Offer | None:
        match = self._text.find(most)
        self._follows = match.follows if match is not None else []
        if match is None:
            return None
        return Offer(_kinds(match.length, len(match.follows)))

    def draft(self, count: int) -> list[int]:
        return self._follows[:count]

    def foresees(self) -> list[int]:
        return self._follows


@cache
def _kinds(length: int, count: int) -> Sequence[Kind]:
    """Those of ``count`` tokens after ``length`` that matched, drafted and accepted ones among
    them."""
    leasts = [max(each for each in EXPECTED if each <= length + at) for at in range(count)]
    return tuple(Kind(("text", least), EXPECTED[least]) for least in leasts)
