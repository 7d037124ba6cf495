"""Edits of code: a function of the standard library, in which one name is to be changed."""

from __future__ import annotations

import fnmatch
import heapq
import inspect
import random
import re
import shlex
import statistics
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

EDITS: list[tuple[Callable[..., Any], str, str]] = [
    (textwrap.indent, "prefix", "margin"),
    (random.Random.sample, "population", "items"),
    (fnmatch.filter, "pat", "pattern"),
    (heapq.merge, "reverse", "descending"),
    (shlex.join, "split_command", "words"),
    (textwrap.shorten, "width", "columns"),
    (statistics.mean, "data", "numbers"),
    (random.Random.shuffle, "x", "items"),
]
"""Functions, a name in each, and the name that it is to have."""

WORDS = re.compile(r" ?\w+|\n *|[^\w\s]|\s")
"""What is about a token of code."""


@dataclass(frozen=True)
class CodeEdit:
    question: str
    answer: str
    """As it should be."""


def code_edit(number: int) -> CodeEdit:
    function, old, new = EDITS[number % len(EDITS)]
    code = textwrap.dedent(inspect.getsource(function))
    question = (
        f"Rename {old} to {new} in this function and change nothing else. Answer with the whole "
        f"function only.\n\n```python\n{code}```"
    )
    edited = re.sub(rf"\b{old}\b", new, code)
    return CodeEdit(question, f"```python\n{edited}```")


def words_as_tokens(texts: list[str], first: int) -> list[list[int]]:
    """Texts as numbers, from ``first`` on, one for each word: for models with random weights."""
    known: dict[str, int] = {}
    return [
        [first + known.setdefault(word, len(known)) for word in WORDS.findall(text)]
        for text in texts
    ]
