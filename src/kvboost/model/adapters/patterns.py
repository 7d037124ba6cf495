"""Patterns that give some modules of an adapter a rank or an alpha of their own.

PEFT takes them for regular expressions. A regular expression can take for ever on a short text, and
no other thread runs meanwhile, so only simple ones are accepted: names, ``.``, classes such as
``[0-9]`` and ``\\d``, a few alternatives such as ``(q|v)_proj``, and up to two of ``*``, ``+`` and
``?`` after a single character or class.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

MOST_PATTERNS = 4096
LONGEST_PATTERN = 256
LONGEST_MODULE = 256
MOST_REPEATS = 2
MOST_ALTERNATIVES = 64
MOST_SECONDS = 5.0
"""For all modules together. A thousand modules with a pattern each take a second."""

_CHARACTER = r"(?:[\w-]|\.|\\[.dwDW]|\[\^?[\w.]+(?:-[\w.]+)*\])"
_GROUP = rf"\((?:\?:)?{_CHARACTER}+(?:\|{_CHARACTER}+)*\)"
_SIMPLE = re.compile(rf"\^?(?:{_CHARACTER}[*+?]?|{_GROUP})+\$?", re.ASCII)
_PARTS = re.compile(rf"(?P<group>{_GROUP})|{_CHARACTER}(?P<repeat>[*+?]?)", re.ASCII)


class Patterns:
    """Numbers by pattern. Raises ``ValueError`` for too many, or for one that is not simple."""

    def __init__(self, values: Mapping[str, float]) -> None:
        if len(values) > MOST_PATTERNS:
            raise ValueError(f"{len(values)} patterns; {MOST_PATTERNS} are allowed")
        self._left = MOST_SECONDS
        self._values = [(_compile(pattern), value) for pattern, value in values.items()]

    def find(self, module: str) -> float | None:
        """The value of the first pattern that a module's path ends with, as PEFT chooses it; None
        if there is none. Raises ``ValueError`` if this takes too long."""
        started = time.monotonic()
        try:
            for pattern, value in self._values:
                if pattern.match(module):
                    return value
                if time.monotonic() - started > self._left:
                    raise ValueError(f"comparing them takes longer than {MOST_SECONDS:.0f} s")
            return None
        finally:
            self._left -= time.monotonic() - started


def _compile(pattern: str) -> re.Pattern[str]:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"a pattern of {len(pattern)} characters; {LONGEST_PATTERN} are allowed")
    parts = list(_PARTS.finditer(pattern)) if _SIMPLE.fullmatch(pattern) else []
    repeats = sum(bool(part["repeat"]) for part in parts)
    alternatives = math.prod(part["group"].count("|") + 1 for part in parts if part["group"])
    if not parts or repeats > MOST_REPEATS or alternatives > MOST_ALTERNATIVES:
        raise ValueError(
            f"{pattern!r} is not a simple pattern: names, '.', classes, a few alternatives such as "
            f"(q|v), and up to {MOST_REPEATS} of * + ?"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a pattern: {error}") from None
