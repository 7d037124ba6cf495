"""Questions about bugs: several files, one of them with a bug, and four functions to choose from.

The files are excerpts of the standard library, whole functions each. The same few files come again
in question after question, in other company and order: that is what reuse lives on.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import zip_longest
from random import Random

from kvboost.bench.texts.mutations import KINDS, Function, Mutation, functions, mutations
from kvboost.config import one_of, whole, within
from kvboost.errors import ConfigError

HINTS = {
    "none": "nothing but that there is a bug",
    "kind": "what kind of mistake it is",
    "line": "the line as it should read",
}
NUM_CANDIDATES = 4
CHANCE = 1 / NUM_CANDIDATES
POOL = 24
EXCERPT_CHARACTERS = 1_700
LEAST_FUNCTIONS = 3

# More than are needed: versions of Python differ in what has docstrings, and in what is there.
_MODULES = (
    "textwrap heapq bisect shlex statistics fractions calendar difflib posixpath ntpath fnmatch "
    "glob genericpath base64 copy linecache mimetypes random shutil tempfile gettext colorsys "
    "ipaddress pprint dis uuid wave zipfile trace timeit dataclasses warnings contextlib "
    "functools string inspect ast tokenize email.utils email.quoprimime urllib.parse html "
    "json.encoder configparser csv argparse optparse queue sched threading subprocess pathlib "
    "http.cookies xml.sax.saxutils imaplib mailbox tarfile locale pkgutil ftplib smtplib"
)


@dataclass(frozen=True)
class Excerpt:
    """Whole functions of one module."""

    module: str
    functions: tuple[Function, ...]

    def text(self, changed: Function | None = None) -> str:
        """As it stands in a prompt; ``changed`` takes the place of the function of its name."""
        shown = [
            changed if changed is not None and changed.name == one.name else one
            for one in self.functions
        ]
        body = "\n\n\n".join(one.source for one in shown)
        return f"# file: {self.module.replace('.', '/')}.py\n{body}\n\n\n"


@dataclass(frozen=True)
class BugQuestion:
    number: int
    module: str
    function: str
    mutation: Mutation
    files: tuple[str, ...]
    """Texts, in the order they are shown."""
    candidates: tuple[str, ...]
    question: str

    @property
    def answer(self) -> int:
        return self.candidates.index(self.function)

    @property
    def key(self) -> str:
        """Names the question by all that is asked."""
        said = "\0".join((*self.files, *self.candidates, self.question))
        return f"{self.number}-{hashlib.blake2b(said.encode(), digest_size=6).hexdigest()}"


@cache
def pool(size: int = POOL) -> tuple[Excerpt, ...]:
    """Excerpts of so many modules; the same ones every time, on one version of Python."""
    found: list[Excerpt] = []
    for name in _MODULES.split():
        if len(found) == size:
            break
        try:
            source = inspect.getsource(import_module(name))
        except (ImportError, OSError):  # not in this version, or not as a file
            continue
        excerpt = _excerpt(name, source)
        if excerpt is not None:
            found.append(excerpt)
    if len(found) < size:
        raise ConfigError(f"pool={size} modules are asked for; this Python has {len(found)}")
    return tuple(found)


def _excerpt(module: str, source: str) -> Excerpt | None:
    chosen: list[Function] = []
    length = 0
    for function in functions(source):
        if length + len(function.source) <= EXCERPT_CHARACTERS and mutations(function.source):
            chosen.append(function)
            length += len(function.source)
    return Excerpt(module, tuple(chosen)) if len(chosen) >= LEAST_FUNCTIONS else None


def make_bugs(
    number: int, *, files: int = 5, hint: str = "line", seed: int = 0, size: int = POOL
) -> list[BugQuestion]:
    """The first ``number`` questions; the same for the same seed and version of Python. No bug
    comes twice before its module has no others."""
    whole(number, 1, "questions")
    within(files, 2, size, "files")
    one_of(hint, list(HINTS), "hint")
    excerpts = pool(size)
    bugs = [_bugs(excerpt, Random(f"{seed}/{excerpt.module}")) for excerpt in excerpts]
    made = []
    for at in range(number):
        own = bugs[at % size]
        function, mutation = own[at // size % len(own)]
        draw = Random(f"{seed}/{at}")
        made.append(_make(at, excerpts, function, mutation, files, hint, draw))
    return made


def _bugs(excerpt: Excerpt, draw: Random) -> list[tuple[Function, Mutation]]:
    """All bugs of a module, in an order in which functions and kinds take turns."""
    groups: dict[tuple[str, str], list[tuple[Function, Mutation]]] = {}
    for function in excerpt.functions:
        for mutation in mutations(function.source):
            groups.setdefault((function.name, mutation.kind), []).append((function, mutation))
    shuffled = list(groups.values())
    draw.shuffle(shuffled)
    for group in shuffled:
        draw.shuffle(group)
    rounds = zip_longest(*shuffled)
    return [bug for turn in rounds for bug in turn if bug is not None]


def _make(
    number: int,
    excerpts: Sequence[Excerpt],
    function: Function,
    mutation: Mutation,
    files: int,
    hint: str,
    draw: Random,
) -> BugQuestion:
    target = excerpts[number % len(excerpts)]
    others = [one for one in excerpts if one is not target]
    while True:
        shown = draw.sample(others, files - 1)
        names = [one.name for excerpt in (target, *shown) for one in excerpt.functions]
        single = [name for name in names if names.count(name) == 1]  # the others would be unclear
        if function.name in single and len(single) >= NUM_CANDIDATES:
            break
    wrong = draw.sample([name for name in single if name != function.name], NUM_CANDIDATES - 1)
    candidates = [function.name, *wrong]
    draw.shuffle(candidates)
    texts = [one.text() for one in shown]
    texts.append(target.text(Function(function.name, mutation.source)))
    draw.shuffle(texts)
    return BugQuestion(
        number,
        target.module,
        function.name,
        mutation,
        tuple(texts),
        tuple(candidates),
        ask(mutation, hint),
    )


def ask(mutation: Mutation, hint: str) -> str:
    """The candidates are not named: a model asked to choose from a list takes the first."""
    told = {
        "none": ".",
        "kind": f": {KINDS[mutation.kind]}.",
        "line": f". It should read:\n\n{mutation.before}",
    }
    return (
        f"In one function of the files above, a line is wrong{told[hint]}\n\n"
        "Which function is it in?"
    )
