"""Questions over passages: read from a file, or made up when there is none.

A made-up question is answered by its passages alone, since every name in it is invented.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from kvboost.bench.texts.json_lines import field_of, read_rows
from kvboost.config import whole, within
from kvboost.errors import ConfigError

EXPECTED = '{"question": "...", "answers": ["..."], "passages": [{"title": "...", "text": "..."}]}'
T = TypeVar("T")
Made = tuple[str, str, list[list[str]]]
"""A question, its answer, and the facts of each passage."""

MAX_PASSAGES = 100  # as far as the invented names last
MIN_WORDS = 60  # so that facts are never most of a passage
FACTS_PER_PASSAGE = 3


@dataclass(frozen=True)
class Question:
    question: str
    answers: tuple[str, ...]
    """Each is right on its own."""
    passages: tuple[str, ...]

    @property
    def ask(self) -> str:
        """The end of a prompt, after the passages."""
        return f"Question: {self.question}\nAnswer in a few words."

    @property
    def begun(self) -> str:
        """With what the answer begins: the model goes on from there."""
        return ""


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions in a file of JSON lines, one each; blank lines are skipped."""
    return read_rows(path, _parse, "question", EXPECTED)


def read_passages(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """(title, text) of all passages in such a file, each once. One without a title has its first
    words for it."""
    every = dict.fromkeys(one for question in read_questions(path) for one in question.passages)
    parted = ((one, *one.partition("\n")) for one in every)
    return [(title[:80], text or one) for one, title, _, text in parted]


def _parse(_: int, row: Any) -> Question:
    """Raises ``ValueError`` that says what is wrong with a row."""
    if isinstance(row, dict) and {"input", "chunks"} <= row.keys():  # as KVShareArena writes it
        passages = [{"text": chunk} for chunk in _several(row, "chunks")]
        row = {**row, "question": row["input"], "passages": passages}
    return Question(
        question=_text(field_of(row, "question"), "question"),
        answers=tuple(_text(answer, "answers") for answer in _several(row, "answers")),
        passages=tuple(_passage(passage) for passage in _several(row, "passages")),
    )


def _several(row: object, name: str) -> list[object]:
    value = field_of(row, name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} is {value!r:.80}, not a list of at least one")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} has {value!r:.80} where a text should be")
    return value


def _passage(passage: object) -> str:
    text = _text(field_of(passage, "text"), "text")
    title = passage.get("title") if isinstance(passage, dict) else None
    return f"{_text(title, 'title')}\n{text}" if title else text


def make_questions(
    count: int, *, seed: int = 0, num_passages: int = 8, words_per_passage: int = 150
) -> list[Question]:
    """Made-up questions: even ones ask for a value in one passage, odd ones need a fact from each
    of two passages.

    The same for the same seed, and a smaller ``count`` gives the first of them. A passage has
    ``words_per_passage`` words, and then its last sentence ends.
    """
    whole(count, 1, "count")
    whole(num_passages, 2, "num_passages")  # two facts of one question never share a passage
    within(num_passages, 2, MAX_PASSAGES, "num_passages")
    whole(words_per_passage, MIN_WORDS, "words_per_passage")
    questions, words = [], _words()
    for number in range(count):
        rng = Random(f"{seed}/{number}")
        names = _names(rng)
        question, answer, facts = (_two_hops if number % 2 else _lookup)(rng, names, num_passages)
        filler = _filler(rng)
        passages = tuple(
            f"{rng.choice(words['titles']).format(next(names))}\n"
            + _write(rng, filler, passage_facts, words_per_passage)
            for passage_facts in facts
        )
        questions.append(Question(question, (answer,), passages))
    return questions


def _lookup(rng: Random, names: Iterator[str], num_passages: int) -> Made:
    """A question for one of many values."""
    words, num_facts = _words(), num_passages * FACTS_PER_PASSAGE
    keys = [
        f"{rng.choice(words['attributes'])} of the {next(names)} {rng.choice(words['places'])}"
        for _ in range(num_facts)
    ]
    values = [str(value) for value in rng.sample(range(10_000, 100_000), num_facts)]
    facts = [f"The {key} is {value}." for key, value in zip(keys, values, strict=True)]
    asked = rng.randrange(num_facts)
    return (
        f"What is the {keys[asked]}?",
        values[asked],
        [facts[passage::num_passages] for passage in range(num_passages)],
    )


def _two_hops(rng: Random, names: Iterator[str], num_passages: int) -> Made:
    """A question that leads from an object over a person to a town.

    Passage ``i`` names object ``i`` and its person; another passage names that person's town.
    """
    object_fact, town_fact, question = rng.choice(_words()["chains"])
    objects = rng.sample(_pairs("materials", "things", " "), num_passages)
    people = rng.sample(_pairs("first_names", "last_names", " "), num_passages)
    towns = [next(names) for _ in range(num_passages)]
    facts = [
        [object_fact.format(thing=thing, person=person)]
        for thing, person in zip(objects, people, strict=True)
    ]
    distance = rng.randrange(1, num_passages)
    for number, (person, town) in enumerate(zip(people, towns, strict=True)):
        facts[(number + distance) % num_passages].append(town_fact.format(person=person, town=town))
    asked = rng.randrange(num_passages)
    return question.format(thing=objects[asked]), towns[asked], facts


def _names(rng: Random) -> Iterator[str]:
    """Invented names of places, each once. No beginning begins another and no end does, so no name
    is inside another name."""
    names = _pairs("name_beginnings", "name_ends", "")
    rng.shuffle(names)
    return iter(names)


def _pairs(firsts: str, seconds: str, between: str) -> list[str]:
    words = _words()
    return [between.join(pair) for pair in product(words[firsts], words[seconds])]


@cache
def _words() -> dict[str, Any]:
    """The parts of made-up texts. Slots have no digits and no names: those are for facts."""
    text = (Path(__file__).parent / "words.json").read_text()
    words: dict[str, Any] = json.loads(text)
    return words


def _filler(rng: Random) -> Iterator[str]:
    """Endless sentences: every template once before one repeats, and no sentence twice unless the
    words run out."""
    choices, templates = _words()["slots"], _words()["templates"]
    seen: set[str] = set()
    while True:
        for template in rng.sample(templates, len(templates)):
            for _attempt in range(20):
                sentence = template.format(
                    **{slot: rng.choice(words) for slot, words in choices.items()}
                )
                if sentence not in seen:
                    break
            seen.add(sentence)
            yield sentence[0].upper() + sentence[1:]


def _write(rng: Random, filler: Iterator[str], facts: Sequence[str], num_words: int) -> str:
    """Filler with the facts at random places in it."""
    missing = num_words - sum(len(fact.split()) for fact in facts)
    sentences: list[str] = []
    while missing > 0:
        sentences.append(next(filler))
        missing -= len(sentences[-1].split())
    for fact in facts:
        sentences.insert(rng.randint(0, len(sentences)), fact)
    return " ".join(sentences)


def choose_questions(datasets: Sequence[str], limit: int | None, part: str) -> list[Question]:
    """The first ``limit`` questions of every file, or made-up ones; of these one part."""
    if datasets:
        questions = [one for path in datasets for one in read_questions(path)[:limit]]
    else:
        questions = make_questions(limit or 20)
    return part_of(questions, part)


def part_of(questions: Sequence[T], part: str) -> list[T]:
    """Every n-th question, for several processes: ``part`` 2/3 is the second of three."""
    number, _, total = part.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise ConfigError(f"part={part!r} must be such as '2/3', the second of three")
    chosen = list(questions[int(number) - 1 :: int(total)])
    if not chosen:
        raise ConfigError(f"part={part!r}: there are only {len(questions)} questions")
    return chosen
