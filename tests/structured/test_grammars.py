"""Grammars over a tokenizer of bytes."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost.errors import StructuredOutputError
from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.structured.formats import after_reasoning, json_grammar, regex_grammar
from kvboost.structured.grammars import KEPT_GRAMMARS, MAX_FORCED, Constraint, Grammars
from support.tiny import EOS, VOCAB, byte_tokenizer

TOKENIZER = ModelTokenizer(byte_tokenizer())


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(TOKENIZER.serialized, VOCAB, [EOS])


def test_the_tokenizer_is_read_once_and_before_the_first_grammar_if_asked() -> None:
    reads: list[str] = []
    grammars = Grammars(lambda: reads.append("read") or TOKENIZER.serialized(), VOCAB, [EOS])
    grammars.prepare()
    assert reads == ["read"]
    start(grammars, choice=["a", "b"])
    assert reads == ["read"]


def start(grammars: Grammars, **options) -> Constraint:
    grammar = grammars.of_format(options)
    assert grammar is not None
    return grammar.start()


def allowed(constraint: Constraint) -> set[int]:
    bits = constraint.allowed()
    return {token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1}


def say(constraint: Constraint, text: str) -> None:
    for token in TOKENIZER.encode(text):
        assert token in allowed(constraint)
        constraint.accept(token)


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(grammars: Grammars) -> None:
    constraint = start(grammars, regex="ab+")
    assert allowed(constraint) == set(TOKENIZER.encode("a"))
    say(constraint, "a")
    assert EOS not in allowed(constraint)
    say(constraint, "b")
    assert allowed(constraint) == {EOS, *TOKENIZER.encode("b")}
    assert not constraint.is_complete
    constraint.accept(EOS)
    assert constraint.is_complete


def test_an_answer_that_cannot_go_on_is_complete(grammars: Grammars) -> None:
    constraint = start(grammars, choice=["yes", "no"])
    say(constraint, "n")
    assert TOKENIZER.decode(constraint.take_forced()) == "o"
    assert constraint.is_complete and constraint.take_forced() == []


def test_padding_of_the_vocabulary_is_never_allowed(grammars: Grammars) -> None:
    constraint = start(grammars, regex="(.|\n)*")
    assert max(allowed(constraint)) == EOS < VOCAB - 1


def test_forced_tokens_come_in_groups(grammars: Grammars) -> None:
    constraint = start(grammars, choice=["x" * (MAX_FORCED + 3)])
    assert len(constraint.take_forced()) == MAX_FORCED
    assert len(constraint.take_forced()) == 3


def test_tokens_need_not_be_forced(grammars: Grammars) -> None:
    grammar = grammars.of_format({"choice": ["abc"]})
    assert grammar is not None
    constraint = grammar.start(forces=False)
    assert constraint.take_forced() == []
    say(constraint, "abc")
    assert constraint.is_complete


def test_answers_in_one_grammar_do_not_see_each_other(grammars: Grammars) -> None:
    first, second = (start(grammars, regex="[ab]c") for _ in range(2))
    say(first, "a")
    assert allowed(second) == set(TOKENIZER.encode("ab"))


def test_reasoning_may_come_first(grammars: Grammars) -> None:
    grammar = after_reasoning(json_grammar({"type": "boolean"}), begun=False)
    direct, thinking = (grammars.compile(grammar).start() for _ in range(2))
    say(direct, "true")
    assert direct.is_complete
    say(thinking, "<think>is <b> a tag?\n</think>\n\nfalse")
    assert thinking.is_complete


def test_reasoning_that_the_prompt_began_must_end_first(grammars: Grammars) -> None:
    constraint = grammars.compile(after_reasoning(json_grammar({"const": 1}), begun=True)).start()
    say(constraint, "hm {</think>\n1")
    assert constraint.is_complete


def test_a_token_that_is_not_allowed_is_an_error(grammars: Grammars) -> None:
    constraint = start(grammars, regex="a")
    with pytest.raises(StructuredOutputError, match="grammar cannot be enforced"):
        constraint.accept(TOKENIZER.encode("b")[0])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
        ({"type": "string", "format": "colour"}, "colour"),
        ({"type": "objct"}, "objct"),
        ({"$ref": "#/$defs/none"}, "none"),
    ],
)
def test_what_a_schema_asks_in_vain_is_named(grammars: Grammars, schema, named: str) -> None:
    with pytest.raises(StructuredOutputError, match="schema cannot be enforced") as caught:
        grammars.compile(json_grammar(schema), "schema")
    assert named in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", [200, 900])
def test_a_deep_schema_is_refused(grammars: Grammars, depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"anyOf": [schema]}
    with pytest.raises(StructuredOutputError, match="cannot be enforced"):
        grammars.compile(json_grammar(schema))


def test_an_error_does_not_quote_a_long_grammar(grammars: Grammars) -> None:
    with pytest.raises(StructuredOutputError) as caught:
        grammars.compile(regex_grammar("(" * 10_000))
    assert len(str(caught.value)) < 500


def test_a_lenient_schema_leaves_out_what_cannot_be_enforced(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"const": 1}, "uniqueItems": True}
    constraint = grammars.compile(json_grammar(schema, lenient=True)).start()
    say(constraint, "[1, 1]")
    assert constraint.is_complete


def test_the_grammars_used_last_are_kept(grammars: Grammars) -> None:
    kept = [grammars.compile(f'{{"grammars": [{{"lark_grammar": "start: \\"{n}\\""}}]}}')
            for n in range(KEPT_GRAMMARS)]  # fmt: skip
    first = '{"grammars": [{"lark_grammar": "start: \\"0\\""}]}'
    assert grammars.compile(first) is kept[0]
    grammars.compile('{"grammars": [{"lark_grammar": "start: \\"new\\""}]}')
    assert grammars.compile(first) is kept[0]
    second = '{"grammars": [{"lark_grammar": "start: \\"1\\""}]}'
    assert grammars.compile(second) is not kept[1]


@pytest.mark.parametrize(
    "options",
    [
        {"regex": "[^\\s\\S]"},
        {"grammar": "start: start"},
        {"schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    ],
)
def test_a_format_that_nothing_matches_is_refused_before_it_runs(
    grammars: Grammars, options: dict[str, Any]
) -> None:
    with pytest.raises(StructuredOutputError) as refused:
        grammars.of_format(options)
    assert str(refused.value) == f"{next(iter(options))} cannot be enforced: no text matches it"


class BrokenMatcher:
    """What llguidance says when a grammar turns out to be too large."""

    def consume_token(self, token_id: int) -> None:
        pass

    def is_error(self) -> bool:
        return True

    def get_error(self) -> str:
        return "lexer error: too many expressions\n<state>\nTokens: 1\n</state>"


def test_an_error_in_the_middle_shows_no_state_of_the_parser() -> None:
    with pytest.raises(StructuredOutputError) as failed:
        Constraint(BrokenMatcher(), forces=True).accept(1)
    assert failed.value.reason == "lexer error: too many expressions"
