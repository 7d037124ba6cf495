from __future__ import annotations

import pytest

from kvboost.bench.texts.prompts import MAX_QUESTIONS, PATTERNS, fragments, passages, question
from kvboost.model.loading.tokenizer import ModelTokenizer
from support.tiny import byte_tokenizer

ENCODE = ModelTokenizer(byte_tokenizer()).encode


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_gives_any_length_and_always_the_same(name) -> None:
    pattern = PATTERNS[name]
    long = pattern.shared(ENCODE, 50_000)
    assert len(long) == 50_000
    assert pattern.shared(ENCODE, 1000) == long[:1000]


def test_passages_are_many_and_differ() -> None:
    texts = [text for _, text in passages()]
    assert len({where for where, _ in passages()}) == len(set(texts)) == len(texts) > 500
    assert sum(map(len, texts)) > 1_000_000


def test_what_a_tokenizer_puts_before_every_text_is_left_out() -> None:
    with_bos = fragments(lambda text: [2, *ENCODE(text)])
    assert with_bos("hello") == fragments(ENCODE)("hello") == ENCODE("hello")


def test_questions_have_the_length_asked_for_and_never_repeat() -> None:
    questions = [question(ENCODE, number, 32) for number in range(MAX_QUESTIONS)]
    assert {len(ids) for ids in questions} == {32}
    assert len({ids[0] for ids in questions}) == MAX_QUESTIONS
    assert len(question(ENCODE, 1, 500)) == 500
