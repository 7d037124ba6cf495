from __future__ import annotations

import json
import re

import pytest

from kvboost.bench.texts.questions import (
    Question,
    make_questions,
    read_passages,
    read_questions,
)
from kvboost.errors import ConfigError

ROW = {
    "question": "Who?",
    "answers": ["Ada", "Ada Lovelace"],
    "passages": [{"title": "Engines", "text": "Ada wrote."}, {"title": "", "text": "Rain fell."}],
}
MADE = make_questions(40)


def write(tmp_path, *rows):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def sentences(question: Question) -> list[str]:
    """Without titles."""
    texts = [passage.split("\n")[1] for passage in question.passages]
    return [sentence for text in texts for sentence in re.split(r"(?<=\.) ", text)]


def holders(question: Question, text: str) -> list[int]:
    return [number for number, passage in enumerate(question.passages) if text in passage]


def test_a_passage_is_its_title_and_its_text(tmp_path) -> None:
    row = {**ROW, "passages": [*ROW["passages"], {"text": "x"}, {"title": None, "text": "y"}]}
    assert read_questions(write(tmp_path, row)) == [
        Question("Who?", ("Ada", "Ada Lovelace"), ("Engines\nAda wrote.", "Rain fell.", "x", "y"))
    ]


def test_a_file_of_kvsharearena_is_read(tmp_path) -> None:
    row = {"_id": "7", "context": "x y", "input": "Who?", "answers": ["Ada"], "chunks": ["x", "y"]}
    assert read_questions(write(tmp_path, row)) == [Question("Who?", ("Ada",), ("x", "y"))]
    with pytest.raises(ConfigError, match="'chunks' is "):
        read_questions(write(tmp_path, {**row, "chunks": []}))


def test_passages_of_a_file_come_once_each_with_a_title(tmp_path) -> None:
    other = {**ROW, "passages": [ROW["passages"][0], {"text": "Long.\nLonger."}]}
    assert read_passages(write(tmp_path, ROW, other)) == [
        ("Engines", "Ada wrote."),
        ("Rain fell.", "Rain fell."),
        ("Long.", "Longer."),
    ]


def test_blank_lines_are_skipped_but_counted(tmp_path) -> None:
    assert len(read_questions(write(tmp_path, ROW, "", ROW, ""))) == 2
    with pytest.raises(ConfigError, match="line 4"):
        read_questions(write(tmp_path, ROW, "", ROW, "{"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("nonsense", "not JSON"),
        ([1], "not an object"),
        ({**ROW, "question": ""}, "'question' has '' where a text should be"),
        ({**ROW, "answers": "Ada"}, "'answers' is 'Ada', not a list"),
        ({**ROW, "answers": []}, r"'answers' is \[\], not a list of at least one"),
        ({**ROW, "answers": [7]}, "'answers' has 7 where a text should be"),
        ({**ROW, "passages": []}, r"'passages' is \[\], not a list of at least one"),
        ({**ROW, "passages": ["text"]}, "'text' is not an object with 'text'"),
        ({**ROW, "passages": [{"title": "x"}]}, "'text' is missing"),
        ({**ROW, "passages": [{"title": 3, "text": "x"}]}, "'title' has 3 where"),
        *(
            ({key: value for key, value in ROW.items() if key != name}, f"'{name}' is missing")
            for name in ROW
        ),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_what_is_expected(
    tmp_path, row, complaint
) -> None:
    path = write(tmp_path, ROW, row)
    with pytest.raises(ConfigError, match=complaint) as error:
        read_questions(path)
    assert f"{path}, line 2: " in str(error.value)
    assert 'expected {"question": ' in str(error.value)


def test_a_line_that_is_not_utf8_is_named(tmp_path) -> None:
    path = write(tmp_path, ROW)
    path.write_bytes(path.read_bytes().replace(b"Ada", b"\xff"))
    with pytest.raises(ConfigError, match="line 1: not UTF-8"):
        read_questions(path)


def test_a_file_without_questions_or_none_at_all_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read \(No such file"):
        read_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="holds no questions"):
        read_questions(write(tmp_path, "", ""))


def test_made_questions_are_the_same_for_a_seed_and_differ_between_seeds() -> None:
    assert make_questions(6, seed=3) == make_questions(9, seed=3)[:6]
    assert not set(make_questions(6, seed=3)) & set(make_questions(6, seed=4))


def test_an_answer_stands_in_one_passage_and_in_no_title() -> None:
    for question in MADE:
        (answer,) = question.answers
        assert len(holders(question, answer)) == 1
        assert sum(sentence.count(answer) for sentence in sentences(question)) == 1
        assert len(set(sentences(question))) == len(sentences(question))


def test_an_even_question_asks_for_the_value_of_a_key() -> None:
    for question in MADE[::2]:
        key = question.question.removeprefix("What is the ").removesuffix("?")
        assert f"The {key} is {question.answers[0]}." in sentences(question)
        facts = re.findall(r"The ([\w ]+ of the \w+ \w+) is (\d{5})\.", " ".join(question.passages))
        assert len(facts) == 3 * len(question.passages)
        assert len({key for key, _ in facts}) == len({value for _, value in facts}) == len(facts)


def test_an_odd_question_leads_over_a_person_from_one_passage_to_another() -> None:
    for question in MADE[1::2]:
        (thing,) = re.findall(r"who \w+ the (\w+ \w+)", question.question)
        (first,) = [sentence for sentence in sentences(question) if f"The {thing} " in sentence]
        (person,) = re.findall(r"(?:by|to) (\w+ \w+)\.", first)
        (second,) = [sentence for sentence in sentences(question) if sentence.startswith(person)]
        assert second.endswith(f"in the town of {question.answers[0]}.")
        assert not set(holders(question, first)) & set(holders(question, second))
        assert not re.search(r"\d", str(question))  # every number is a fact


@pytest.mark.parametrize("num_words", [60, 400])
def test_passages_have_the_length_asked_for(num_words) -> None:
    for question in make_questions(2, num_passages=3, words_per_passage=num_words):
        lengths = [len(passage.split("\n")[1].split()) for passage in question.passages]
        assert len(lengths) == 3
        assert all(num_words <= length < num_words + 30 for length in lengths)


@pytest.mark.parametrize(
    "options", [{"count": 0}, {"num_passages": 1}, {"num_passages": 101}, {"words_per_passage": 10}]
)
def test_sizes_that_cannot_be_made_are_refused(options) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        make_questions(**{"count": 1, **options})
