"""Edits of code: a function of the standard library, in which one name is to be changed."""

from __future__ import annotations

import ast
import calendar
import collections
import configparser
import dataclasses
import difflib
import fnmatch
import heapq
import inspect
import logging
import queue
import random
import re
import sched
import shlex
import statistics
import textwrap
import threading
import urllib.parse
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

CONTEXT_CHARACTERS = 120
"""Of a file before a function in it that is shown."""


class Edit(NamedTuple):
    """A function, a name in it, and the name that it is to have."""

    function: Callable[..., Any]
    old: str
    new: str

    @property
    def module(self) -> str:
        return self.function.__module__

    @property
    def name(self) -> str:
        return self.function.__qualname__

    @property
    def code(self) -> str:
        return textwrap.dedent(inspect.getsource(self.function))

    @property
    def edited(self) -> str:
        """As it should be."""
        return re.sub(rf"\b{self.old}\b", self.new, self.code)

    @property
    def first_line(self) -> str:
        """Of the edited function."""
        return self.edited.partition("\n")[0] + "\n"

    def in_file(self, characters: int) -> str:
        """About so many characters of its file: some lines before it, it, and what follows."""
        file = inspect.getsource(import_module(self.module))
        code = inspect.getsource(self.function)
        start = file.index(code)
        first = file.find("\n", max(0, start - CONTEXT_CHARACTERS)) + 1
        return file[first : max(first + characters, start + len(code))]


EDITS = [
    Edit(textwrap.indent, "prefix", "margin"),
    Edit(random.Random.sample, "population", "items"),
    Edit(fnmatch.filter, "pat", "pattern"),
    Edit(heapq.merge, "reverse", "descending"),
    Edit(shlex.join, "split_command", "words"),
    Edit(textwrap.shorten, "width", "columns"),
    Edit(statistics.mean, "data", "numbers"),
    Edit(random.Random.shuffle, "x", "items"),
    Edit(calendar.leapdays, "y1", "first"),
    Edit(ast.iter_fields, "node", "tree"),
    Edit(collections.ChainMap.pop, "key", "name"),
    Edit(dataclasses.is_dataclass, "obj", "value"),
    Edit(logging.Logger.addHandler, "hdlr", "added"),
    Edit(urllib.parse.unquote_plus, "string", "quoted"),
    Edit(zipfile.ZipFile.getinfo, "name", "member"),
    Edit(threading.settrace, "func", "tracer"),
    Edit(sched.scheduler.cancel, "event", "entry"),
    Edit(configparser.RawConfigParser.remove_section, "section", "heading"),
    Edit(textwrap.TextWrapper.fill, "text", "prose"),
    Edit(difflib.IS_LINE_JUNK, "line", "row"),
    Edit(queue.Queue.put_nowait, "item", "element"),
    Edit(logging.Handler.setLevel, "level", "threshold"),
    Edit(configparser.ConfigParser.add_section, "section", "heading"),
    Edit(calendar.weekday, "year", "the_year"),
    Edit(calendar.monthrange, "month", "the_month"),
    Edit(collections.Counter.__delitem__, "elem", "key"),
]

WORDS = re.compile(r" ?\w+|\n *|[^\w\s]|\s")
"""Matches about a token of code."""


@dataclass(frozen=True)
class CodeEdit:
    question: str
    answer: str
    """As it should be."""


def code_edit(number: int) -> CodeEdit:
    one = EDITS[number % len(EDITS)]
    question = (
        f"Rename {one.old} to {one.new} in this function and change nothing else. Answer with the "
        f"whole function only.\n\n```python\n{one.code}```"
    )
    return CodeEdit(question, f"```python\n{one.edited}```")


def words_as_tokens(texts: list[str], first: int) -> list[list[int]]:
    """Texts as numbers, from ``first`` on, one for each word: for models with random weights."""
    known: dict[str, int] = {}
    return [
        [first + known.setdefault(word, len(known)) for word in WORDS.findall(text)]
        for text in texts
    ]
