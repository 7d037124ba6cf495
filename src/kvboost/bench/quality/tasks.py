"""The tasks of ``kvboost quality`` over passages: questions, or something long to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from random import Random

from kvboost.bench.kit.benchmark import option
from kvboost.bench.kit.stats import edit_similarity, rouge_l
from kvboost.bench.quality.doctests import SECONDS, passes_doctest
from kvboost.bench.quality.rows import QUESTIONS
from kvboost.bench.quality.written import FENCE, is_function, same_code, written_function
from kvboost.bench.texts.edits import Edit, edits
from kvboost.bench.texts.functions import (
    Function,
    beginning,
    files_before,
    functions,
    titled,
)
from kvboost.bench.texts.prompts import docstrings, sources
from kvboost.bench.texts.questions import Question, choose_questions, part_of
from kvboost.bench.texts.trace import spread
from kvboost.errors import ConfigError

TASKS = (QUESTIONS, "summary", "code", "edit")
ANSWER_TOKENS, LONG_ANSWER_TOKENS = 16, 128
USUAL_LIMIT = 20
CHARACTERS_PER_TOKEN = (2.5, 4)
"""Of code, at least and at most."""

WITH_DOCTESTS = ("statistics", "collections", "difflib", "pickletools", "typing")
LONGEST_HEAD = 900
"""Characters of a function's signature and docstring."""


@dataclass(frozen=True, kw_only=True)
class Asking:
    """A task and its options."""

    task: str = option(
        QUESTIONS,
        "questions: short answers; summary: of the passages of --dataset, or of docstrings; code: "
        "the rest of a function of the standard library, whose file and imports are the passages; "
        "edit: a function of an open file with one name changed. The answers of the last three are "
        "compared with those of full prefill. Code that a model writes for code is run, to see "
        f"whether it passes its doctest: in another process, for at most {SECONDS:.0f} seconds, "
        "without network, files to write or other processes.",
        choices=TASKS,
    )
    datasets: tuple[str, ...] = option(
        (),
        "JSON lines with question, answers and passages, or a file of KVShareArena; made-up "
        "questions if not given. Not for code and edit.",
        "dataset",
    )
    limit: int | None = option(
        None, "Questions of every file; 20 if they are made up or of another task.", least=1
    )
    part: str = option("1/1", "2/3: every third question, from the second.")
    passages: int = option(8, "Passages in a prompt.", least=2)
    passage_tokens: int = option(256, "The most tokens of a passage.", least=64)
    answer_tokens: int | None = option(
        None,
        f"The most tokens of an answer; {ANSWER_TOKENS} if not given, or {LONG_ANSWER_TOKENS} for "
        "other tasks than questions.",
        least=1,
    )

    @property
    def longest_answer(self) -> int:
        usual = ANSWER_TOKENS if self.task == QUESTIONS else LONG_ANSWER_TOKENS
        return self.answer_tokens or usual

    @property
    def passage_characters(self) -> int:
        """Enough for a passage of code."""
        return round(CHARACTERS_PER_TOKEN[1] * self.passage_tokens)

    @property
    def answer_characters(self) -> int:
        """Of code that fits an answer of the usual length, or of a longer one."""
        return round(CHARACTERS_PER_TOKEN[0] * max(self.longest_answer, LONG_ANSWER_TOKENS))


@dataclass(frozen=True)
class LongQuestion(Question, ABC):
    """Something long to be written; ``question`` is its name."""

    @abstractmethod
    def likeness(self, answer: str, full: str) -> float:
        """Of two answers, between 0 and 1."""

    def check(self, answer: str, *, is_whole: bool) -> tuple[bool | None, bool | None]:
        """Whether the code that was written parses, and whether it is right; None if that cannot be
        said. ``is_whole``: the model has ended the answer itself."""
        return None, None


@dataclass(frozen=True)
class SummaryQuestion(LongQuestion):
    @property
    def ask(self) -> str:
        return "Summarize all of these texts in one paragraph of about a hundred words."

    def likeness(self, answer: str, full: str) -> float:
        return rouge_l(answer, full)


@dataclass(frozen=True)
class CodeQuestion(LongQuestion):
    def likeness(self, answer: str, full: str) -> float:
        return edit_similarity(answer, full)

    def check(self, answer: str, *, is_whole: bool) -> tuple[bool | None, bool | None]:
        code = written_function(self.begun + answer, is_whole=is_whole)
        parses = is_function(code)
        return parses, (parses and self.is_right(code)) if self.can_tell else None

    @property
    def can_tell(self) -> bool:
        """Whether ``is_right`` knows what is right."""
        return True

    @abstractmethod
    def is_right(self, code: str) -> bool:
        """Whether the function does what was asked for."""


@dataclass(frozen=True)
class Completion(CodeQuestion):
    """The rest of a function, of which the answer begins with signature and docstring."""

    function: Function

    @property
    def ask(self) -> str:
        one = self.function
        return f"Above are files of a project. Write the function {one.name} of {one.path}."

    @property
    def begun(self) -> str:
        return f"{FENCE}python\n{self.function.head}"

    @cached_property
    def can_tell(self) -> bool:
        """Whether the function as the library has it passes its doctest here."""
        return self.function.has_doctest and self.is_right(self.function.source)

    def is_right(self, code: str) -> bool:
        return passes_doctest(self.function.module, self.function.name, code)


@dataclass(frozen=True)
class Change(CodeQuestion):
    """A function of an open file with one name changed. The answer begins with its first line."""

    edit: Edit

    @property
    def ask(self) -> str:
        old, new, function = self.edit.old, self.edit.new, self.edit.function
        return (
            f"Above are the open files. Rename {old} to {new} in {function.name} of "
            f"{function.path} and change nothing else. Answer with the whole function only."
        )

    @property
    def begun(self) -> str:
        return f"{FENCE}python\n{self.edit.first_line}"

    def is_right(self, code: str) -> bool:
        return same_code(code, self.edit.edited)


def choose(asking: Asking) -> list[Question]:
    """The first ``limit`` questions of the task, and of these one part."""
    if asking.task == QUESTIONS:
        return choose_questions(asking.datasets, asking.limit, asking.part)
    if asking.task == "summary":
        return part_of(list(_summaries(asking)), asking.part)
    if asking.datasets:
        raise ConfigError(
            f"dataset={asking.datasets[0]!r}: the task {asking.task!r} takes code of the standard "
            "library; leave the dataset out, or give --task summary"
        )
    every = _completions(asking) if asking.task == "code" else _changes(asking)
    made = list(islice(every, asking.limit or USUAL_LIMIT))
    if len(made) < (asking.limit or 0):
        raise ConfigError(
            f"limit={asking.limit}: only {len(made)} functions for {asking.task} fit an answer of "
            f"{asking.longest_answer} tokens; give a lower limit or longer answers"
        )
    return part_of(made, asking.part)


def _summaries(asking: Asking) -> Iterator[Question]:
    if asking.datasets:
        for one in choose_questions(asking.datasets, asking.limit, "1/1"):
            yield SummaryQuestion(f"summary: {one.question}", (), one.passages)
        return
    texts = [f"{name}\n{text}" for name, text in docstrings()]
    for number in range(asking.limit or USUAL_LIMIT):
        drawn = Random(number).sample(texts, min(asking.passages, len(texts)))
        yield SummaryQuestion(f"summary {number}", (), tuple(drawn))


def _completions(asking: Asking) -> Iterator[Question]:
    """Of functions that fit the answer, from each module in turn: those with doctests, and then
    others that have some of their file before them."""
    longest, size = asking.answer_characters, asking.passage_characters

    def fitting(modules: Iterable[str], *, doctest: bool) -> list[Function]:
        groups = [
            [
                one
                for one in functions(module)
                if one.has_doctest == doctest
                and len(one.head) <= LONGEST_HEAD
                and len(one.body) <= longest
            ]
            for module in modules
        ]
        return spread(groups)

    others = fitting((name for name, _ in sources()), doctest=False)
    others = [one for one in others if len(one.before) > size]
    for one in (*fitting(WITH_DOCTESTS, doctest=True), *others):
        before = files_before(one, asking.passages, size)
        yield Completion(f"code: {one.module}.{one.name}", (), before, one)


def _changes(asking: Asking) -> Iterator[Question]:
    """Of functions that fit the answer, each in a file among other open files."""
    longest = asking.answer_characters
    size = asking.passage_characters
    for number, one in enumerate(edit for edit in edits() if len(edit.code) <= longest):
        shuffler, module = Random(number), one.function.module
        others = [name for name, _ in sources() if name != module]
        names = shuffler.sample(others, min(asking.passages - 1, len(others)))
        files = [beginning(name, size) for name in names]
        files.insert(shuffler.randrange(len(files) + 1), titled(module, one.in_file(size)))
        yield Change(f"edit: {one.old} in {module}.{one.function.name}", (), tuple(files), one)
