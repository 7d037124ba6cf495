"""Edits of code: a function of the standard library, in which one name is to be changed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from kvboost.bench.texts.functions import Function, functions, source_of
from kvboost.bench.texts.prompts import sources

CONTEXT_CHARACTERS = 120
"""Of a file before a function in it that is shown."""
CHOSEN = """
textwrap indent prefix margin
random Random.sample population items
fnmatch filter pat pattern
heapq merge reverse descending
shlex join split_command words
textwrap shorten width columns
statistics mean data numbers
random Random.shuffle x items
calendar leapdays y1 first
ast iter_fields node tree
collections ChainMap.pop key name
dataclasses is_dataclass obj value
logging Logger.addHandler hdlr added
urllib.parse unquote_plus string quoted
zipfile ZipFile.getinfo name member
threading settrace func tracer
sched scheduler.cancel event entry
configparser RawConfigParser.remove_section section heading
textwrap TextWrapper.fill text prose
difflib IS_LINE_JUNK line row
queue Queue.put_nowait item element
logging Handler.setLevel level threshold
configparser ConfigParser.add_section section heading
calendar weekday year the_year
calendar monthrange month the_month
collections Counter.__delitem__ elem key
"""
"""Edits that people might ask for: module, function, the old name and the new one."""


class Edit(NamedTuple):
    """A function, a name in it, and the name that it is to have."""

    function: Function
    old: str
    new: str

    @property
    def code(self) -> str:
        return self.function.source

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
        file, start = source_of(self.function.module) or "", len(self.function.before)
        lines = file[start:].splitlines(keepends=True)[: self.code.count("\n")]
        first = file.find("\n", max(0, start - CONTEXT_CHARACTERS)) + 1
        return file[first : max(first + characters, start + len("".join(lines)))]


@cache
def edits() -> tuple[Edit, ...]:
    """The chosen ones, then one of each other function that has a name to change."""
    first = [_chosen(*line.split()) for line in CHOSEN.strip().splitlines()]
    modules = dict.fromkeys(
        [name for name, _ in sources()] + [one.function.module for one in first]
    )
    known = {one.function for one in first}
    return (*first, *(one for one in _found(modules) if one.function not in known))


def _chosen(module: str, name: str, old: str, new: str) -> Edit:
    return Edit(next(one for one in functions(module) if one.name == name), old, new)


def _found(modules: Iterable[str]) -> Iterator[Edit]:
    for module in modules:
        for one in functions(module):
            if (old := _name_to_change(one.source)) is not None:
                yield Edit(one, old, f"{old}_given")


def _name_to_change(code: str) -> str | None:
    """The first parameter or variable of a function that it uses, and whose name means nothing else
    in it, in text neither."""
    tree = ast.parse(code)
    names, own, others = list[str](), list[str](), {"self", "cls"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, context):
                names.append(name)
                own += [name] if isinstance(context, ast.Store) else []
            case ast.arg(name):
                own.append(name)
            case ast.Attribute(attr=name) | ast.keyword(arg=str(name)):
                others.add(name)
            case ast.FunctionDef(name) | ast.ClassDef(name) | ast.ExceptHandler(name=str(name)):
                others.add(name)
            case ast.alias(name, other):
                others |= {name, other or name}
            case ast.Global(several) | ast.Nonlocal(several):
                others.update(several)
            case ast.Constant(str(text)) if text != _docstring(tree):
                others.update(re.findall(r"\w+", text))
    usable = (one for one in own if one not in others)
    return next((one for one in usable if names.count(one) > 1), None)


def _docstring(tree: ast.Module) -> str | None:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return ast.get_docstring(function, clean=False)
