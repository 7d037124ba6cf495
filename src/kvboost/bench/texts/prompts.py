"""Prompts people really send, of any length, from text that is on any machine with Python.

Each pattern is a long shared beginning and many short, different ends: the questions.
"""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import takewhile

Encode = Callable[[str], list[int]]

QUESTIONS = (
    "Which part of this would you change first, and what would you put in its place?",
    "Summarize the most important point in one sentence for a colleague in a hurry.",
    "What happens at the edges: empty input, very large input, input of the wrong kind?",
    "Name three things that are missing here and say why each of them matters.",
    "Explain the second paragraph as you would to a student in the first year.",
    "Is there anything in this text that contradicts something else in this text?",
    "Write the shortest test that would fail if the main idea were wrong.",
    "What did the author assume about the reader, and is that assumption fair?",
)

OPENINGS = string.ascii_letters
MAX_QUESTIONS = len(OPENINGS)
PIECE_CHARACTERS = 1500
"""The least of a piece of a source file."""

_MODULES = (
    "textwrap heapq bisect string shlex statistics fractions queue sched calendar difflib argparse "
    "configparser csv dataclasses functools contextlib collections tempfile zipfile logging ast "
    "threading subprocess pathlib unittest.mock urllib.parse http.client email.message"
)


def fragments(encode: Encode) -> Encode:
    """``encode`` without what it puts before every text (a BOS token), for texts to be joined."""
    added = num_shared(encode("a"), encode("b"))
    return lambda text: encode(text)[added:]


def num_shared(left: Sequence[int], right: Sequence[int]) -> int:
    """How many first tokens two texts share."""
    pairs = zip(left, right, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Pattern:
    name: str
    text: Callable[[], Iterator[str]]
    """Pieces of the shared beginning, one after the other, more than any prompt needs."""

    def shared(self, encode: Encode, num_tokens: int) -> list[int]:
        """The first ``num_tokens`` tokens of the pattern's text."""
        ids: list[int] = []
        for piece in self.text():
            ids += encode(piece)
            if len(ids) >= num_tokens:
                return ids[:num_tokens]
        raise ValueError(f"{self.name} has only {len(ids):,} tokens of text, not {num_tokens:,}")


class Unread:
    """Text that comes once: each call goes on where the one before ended."""

    def __init__(self, encode: Encode) -> None:
        self._pieces = (encode(source) for _, source in sources())
        self._ids: list[int] = []

    def take(self, num_tokens: int) -> list[int]:
        while len(self._ids) < num_tokens:
            piece = next(self._pieces, None)
            if piece is None:
                raise ValueError(f"no {num_tokens:,} tokens of unread text are left")
            self._ids += piece
        taken, self._ids = self._ids[:num_tokens], self._ids[num_tokens:]
        return taken


def question(encode: Encode, number: int, num_tokens: int) -> list[int]:
    """Exactly ``num_tokens`` tokens in the words of a user. The very first differs for every
    number below ``MAX_QUESTIONS``, so nothing of one is known from another."""
    ids = encode(f"{OPENINGS[number]}) {QUESTIONS[number % len(QUESTIONS)]} ")
    while len(ids) < num_tokens:
        ids += ids
    return ids[:num_tokens]


@cache
def sources() -> tuple[tuple[str, str], ...]:
    """(module, source) of modules of the standard library, in a fixed order."""
    return tuple((name, inspect.getsource(import_module(name))) for name in _MODULES.split())


@cache
def docstrings() -> tuple[tuple[str, str], ...]:
    """(where, text) of the longer documentation strings of the same modules."""
    found = []
    for name in _MODULES.split():
        for member_name, member in sorted(vars(import_module(name)).items()):
            text = inspect.getdoc(member) if callable(member) else None
            if text and len(text) > 300 and getattr(member, "__module__", "") == name:
                found.append((f"{name}.{member_name}", text))
    return tuple(found)


@cache
def passages() -> tuple[tuple[str, str], ...]:
    """(where, text) of the sources in pieces that end where a paragraph does."""
    found: list[tuple[str, str]] = []
    for name, source in sources():
        for piece in pieces(source, PIECE_CHARACTERS):
            found.append((f"{name}, part {len(found)}", piece))
    return tuple(found)


def pieces(text: str, least: int) -> Iterator[str]:
    """Whole paragraphs of at least so many characters together; a short rest is left out."""
    piece = ""
    for block in text.split("\n\n"):
        piece += f"{block}\n\n"
        if len(piece) >= least:
            yield piece.strip()
            piece = ""


def _code() -> Iterator[str]:
    yield "You review Python code. The file under review follows.\n"
    for name, source in sources():
        yield f"\n# file: {name.replace('.', '/')}.py\n{source}"


def _rag() -> Iterator[str]:
    yield "Answer from the passages below and from nothing else.\n"
    for number, (where, text) in enumerate(_forever(docstrings()), start=1):
        yield f"\n[{number}] {where}\n{text}\n"


def _system() -> Iterator[str]:
    yield "You are the support assistant of a Python course. Rules and reference:\n"
    for number, (where, text) in enumerate(_forever(docstrings()[::-1]), start=1):
        yield f"\nRule {number}. When asked about {where}, rely on this text: {text}\n"


def _chat() -> Iterator[str]:
    for number, (where, text) in enumerate(_forever(docstrings()[::2] + docstrings()[1::2])):
        yield f"<|im_start|>user\nTurn {number}: what does {where} do?<|im_end|>\n"
        yield f"<|im_start|>assistant\n{text}<|im_end|>\n"


def _few_shot() -> Iterator[str]:
    yield "Give the name of the object that a text describes.\n"
    for where, text in _forever(docstrings()[1::2] + docstrings()[::2]):
        yield f"\nText: {text[:300]}\nName: {where}\n"


def _forever(items: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, str]]:
    """Again and again; what comes again is marked, so that no two rounds are alike."""
    for round_number in range(1000):
        for where, text in items:
            yield (f"{where} ({round_number})" if round_number else where), text


PATTERNS = {
    pattern.name: pattern
    for pattern in (
        Pattern("chat", _chat),
        Pattern("code", _code),
        Pattern("system", _system),
        Pattern("rag", _rag),
        Pattern("fewshot", _few_shot),
    )
}
