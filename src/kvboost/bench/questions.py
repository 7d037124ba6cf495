"""Questions over passages: read from a file, or made up when there is none.

A made-up question is answered by its passages alone, since every name in it is invented.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random

from kvboost.config import whole, within
from kvboost.errors import ConfigError

EXPECTED = '{"question": "...", "answers": ["..."], "passages": [{"title": "...", "text": "..."}]}'
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


def read_questions(path: str | os.PathLike[str]) -> list[Question]:
    """The questions in a file of JSON lines, one each; blank lines are skipped."""
    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be read ({error.strerror}); "
            f"give a file with one question a line: {EXPECTED}"
        ) from error
    questions = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            questions.append(_parse(line))
        except ValueError as error:
            raise ConfigError(
                f"{os.fspath(path)}, line {number}: {error}; expected {EXPECTED}"
            ) from error
    if not questions:
        raise ConfigError(
            f"{os.fspath(path)}, line 1: the file holds no questions; "
            f"expected one question a line: {EXPECTED}"
        )
    return questions


def _parse(line: bytes) -> Question:
    """Raises ``ValueError`` that says what is wrong with the line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason})") from error
    answers = _several(row, "answers")
    passages = _several(row, "passages")
    return Question(
        question=_text(_field(row, "question"), "question"),
        answers=tuple(_text(answer, "answers") for answer in answers),
        passages=tuple(_passage(passage) for passage in passages),
    )


def _field(row: object, name: str) -> object:
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is not an object with {name!r}")
    if name not in row:
        raise ValueError(f"{name!r} is missing")
    return row[name]


def _several(row: object, name: str) -> list[object]:
    value = _field(row, name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name!r} is {value!r:.80}, not a list of at least one")
    return value


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name!r} has {value!r:.80} where a text should be")
    return value


def _passage(passage: object) -> str:
    text = _text(_field(passage, "text"), "text")
    title = passage.get("title") if isinstance(passage, dict) else None
    return _titled(_text(title, "title"), text) if title else text


def _titled(title: str, text: str) -> str:
    return f"{title}\n{text}"


def make_questions(
    count: int, *, seed: int = 0, num_passages: int = 8, words_per_passage: int = 150
) -> list[Question]:
    """Made-up questions: even ones ask for a value that stands in one passage, odd ones need
    a fact from each of two passages.

    The same for the same seed, and a smaller ``count`` gives the first of them. A passage's text
    has ``words_per_passage`` words, and those that its last sentence has more.
    """
    whole(count, 1, "count")
    whole(num_passages, 2, "num_passages")  # two facts of one question never share a passage
    within(num_passages, 2, MAX_PASSAGES, "num_passages")
    whole(words_per_passage, MIN_WORDS, "words_per_passage")
    questions = []
    for number in range(count):
        rng = Random(f"{seed}/{number}")
        names = _names(rng)
        question, answer, facts = (_two_hops if number % 2 else _lookup)(rng, names, num_passages)
        filler = _filler(rng)
        passages = tuple(
            _titled(
                rng.choice(TITLES).format(next(names)),
                _write(rng, filler, passage_facts, words_per_passage),
            )
            for passage_facts in facts
        )
        questions.append(Question(question, (answer,), passages))
    return questions


def _lookup(rng: Random, names: Iterator[str], num_passages: int) -> Made:
    """A question for one of many values."""
    places = PLACES.split()
    num_facts = num_passages * FACTS_PER_PASSAGE
    keys = [
        f"{rng.choice(ATTRIBUTES)} of the {next(names)} {rng.choice(places)}"
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

    Passage ``i`` names object ``i`` and its person; that person's town stands in another passage.
    """
    object_fact, town_fact, question = rng.choice(CHAINS)
    objects = [
        f"{material} {thing}"
        for material, thing in rng.sample(_pairs(MATERIALS, THINGS), num_passages)
    ]
    people = [
        f"{first} {last}"
        for first, last in rng.sample(_pairs(FIRST_NAMES, LAST_NAMES), num_passages)
    ]
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
    """Invented names of places; none comes twice."""
    names = [beginning + end for beginning, end in _pairs(NAME_BEGINNINGS, NAME_ENDS)]
    rng.shuffle(names)
    return iter(names)


def _pairs(firsts: str, seconds: str) -> list[tuple[str, str]]:
    return list(product(firsts.split(), seconds.split()))


def _filler(rng: Random) -> Iterator[str]:
    """Sentences without end: every template once before any comes again, and no sentence twice
    unless the words run out."""
    choices = {slot: words.split(", ") for slot, words in WORDS.items()}
    seen: set[str] = set()
    while True:
        for template in rng.sample(TEMPLATES, len(TEMPLATES)):
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


# No beginning begins another and no end does, so no name stands inside another name.
NAME_BEGINNINGS = (
    "Ald Bren Cald Corr Dun Esk Farn Gal Hask Ill Jor Kell Lorr Marn Nev Orl Pell Quill Rud Sel "
    "Tarv Ulm Verr Wex"
)
NAME_ENDS = (
    "by bury combe dale field ford gate ham holt kirk ley lund mere moor stead thorpe ton well "
    "wick worth"
)

TITLES = (
    "Notes from the {} valley",
    "A walk along the {} road",
    "Minutes of the {} council",
    "A letter from {}",
    "The {} almanac",
    "A winter in {}",
)

ATTRIBUTES = ("access code", "locker number", "permit number", "radio code", "account number")
PLACES = "depot mill harbour archive workshop station orchard observatory brewery quarry"

CHAINS = (
    (
        "The {thing} is kept by {person}.",
        "{person} lives in the town of {town}.",
        "In which town does the person who keeps the {thing} live?",
    ),
    (
        "The {thing} was repaired by {person}.",
        "{person} was born in the town of {town}.",
        "In which town was the person who repaired the {thing} born?",
    ),
    (
        "The {thing} was sold to {person}.",
        "{person} runs an inn in the town of {town}.",
        "In which town does the person who bought the {thing} run an inn?",
    ),
)
MATERIALS = "brass copper ivory silver oak walnut marble leather velvet amber pewter jade"
THINGS = "compass mirror flute chest lantern clock chessboard goblet violin globe mask dagger"
FIRST_NAMES = "Agnes Boris Celia Dario Edith Felix Greta Hugo Irene Jonas Katja Leon"
LAST_NAMES = "Abbot Bellamy Castor Drummond Engel Fontaine Grieg Hollis Iversen Janssen"

# What a template's slots are filled with; no digits and no names, which are for facts.
WORDS = {
    "who": (
        "the baker, the schoolteacher, an old ferryman, the youngest clerk, a travelling "
        "musician, the postmistress, one of the gardeners, the carpenter's apprentice, a retired "
        "engineer, the night porter, a group of students, the innkeeper"
    ),
    "other": (
        "the miller, a neighbour, the stationmaster, two visitors from the coast, the librarian, "
        "a cousin from the mountains, the shepherds, the new doctor, several farmers, the weaver"
    ),
    "where": (
        "by the river, behind the church, near the old bridge, in the market square, on the edge "
        "of the forest, beside the railway line, at the top of the hill, below the vineyard, in "
        "the narrow lane, outside the bakery, along the canal, under the lime trees"
    ),
    "when": (
        "early in the morning, before the first frost, late in the afternoon, during the harvest, "
        "after the long winter, on the second day of the fair, shortly before noon, in the last "
        "week of spring, when the lamps were lit, after the heavy rain"
    ),
    "thing": (
        "a basket of pears, a bundle of letters, the broken cart, a crate of glass bottles, a "
        "roll of blue cloth, an unfinished painting, a sack of barley, a pair of muddy boots, a "
        "jar of honey, the heavy ladder, a stack of newspapers, a folded map"
    ),
    "topic": (
        "the price of wool, the repairs to the roof, the coming election, the flooded cellar, the "
        "new timetable, the quality of the bread, the lost dog, the choir's next concert, the "
        "width of the road, the shortage of firewood, the school play"
    ),
    "mood": (
        "with great patience, without much interest, rather loudly, in good spirits, with some "
        "hesitation, to everyone's surprise, as carefully as possible, with a quiet smile, in a "
        "great hurry"
    ),
    "weather": (
        "a thin mist, a warm wind, light snow, a sudden shower, a bright haze, the smell of "
        "smoke, a cold draught, the sound of bells"
    ),
    "building": (
        "the town hall, the tannery, the little theatre, the washhouse, the stables, the weighing "
        "house, the chapel, the boathouse, the grain store, the old pharmacy"
    ),
}

TEMPLATES = (
    "{when}, {who} carried {thing} to {building}.",
    "{who} talked with {other} about {topic} {mood}.",
    "{weather} drifted over the houses {where}, and nobody paid attention to {topic}.",
    "{thing} lay {where}, left there by {other}.",
    "{who} and {other} met {where} {when}.",
    "Nobody could say why {other} had painted the door of {building} green.",
    "Because of {topic}, {building} stayed closed until {other} came back.",
    "It was {who} who first noticed {weather} {where}.",
    "{other} had promised to bring {thing}, but arrived {when} with empty hands.",
    "If {topic} came up at dinner, {who} would change the subject {mood}.",
    "From the windows of {building} one could see {who} resting {where}.",
    "{when}, {weather} reached {building}, and the children ran inside.",
    "{who} exchanged {thing} for a day of work {where}.",
    "Most people agreed that {topic} mattered less than the state of {building}.",
    "{other} waited {where} for an hour and then went home {mood}.",
    "A small crowd had gathered {where} to hear {other} speak about {topic}.",
    "The path to {building} was narrow, so {who} left {thing} {where}.",
    "Once, {when}, {other} slept on a bench {where}.",
    "{who} wrote a long letter about {topic} and read it aloud {mood}.",
    "Between {building} and the gate, {other} had planted a row of beans.",
    "According to {other}, {weather} always meant that guests would come.",
    "{thing} stood in the hall of {building} until {who} took it away {when}.",
    "{who} laughed, since {other} had mistaken {thing} for a present.",
    "Every year {other} would sweep the steps of {building} {mood}.",
)


def choose_questions(datasets: Sequence[str], limit: int | None, part: str) -> list[Question]:
    """The first ``limit`` questions of every file, or made-up ones; of those every n-th, for
    several processes: ``part`` 2/3 is the second of three."""
    questions = (
        [question for path in datasets for question in read_questions(path)[:limit]]
        if datasets
        else make_questions(limit or 20)
    )
    number, _, total = part.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise ConfigError(f"part={part!r} must be such as '2/3', the second of three")
    chosen = questions[int(number) - 1 :: int(total)]
    if not chosen:
        raise ConfigError(f"part={part!r}: there are only {len(questions)} questions")
    return chosen
