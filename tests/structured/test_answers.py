"""Answers in a format, on random weights."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field

from kvboost import KVBoost, StructuredOutputError
from kvboost.model.execution.segment import Segment
from kvboost.structured.formats import after_reasoning, json_grammar
from support.schemas import schemas
from support.tiny import EOS, longrope_model, make_engine, runner_of, tiny_model

EXAMPLES = int(os.environ.get("KVBOOST_TEST_SCHEMAS", "40"))
"""``KVBOOST_TEST_SCHEMAS=1000`` tries a thousand schemas."""
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=4)]
    age: Annotated[int, Field(ge=0, le=99)]


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    with make_engine(tiny_model("llama", max_position_embeddings=1024)) as engine:
        yield engine


@pytest.fixture
def forwards(engine: KVBoost, monkeypatch) -> list[list[int]]:
    """The number of rows of each segment, forward by forward."""
    seen: list[list[int]] = []
    forward = runner_of(engine)
    run = forward.run

    def counted(segments: list[Segment]) -> Any:
        seen.append([len(segment) for segment in segments])
        return run(segments)

    monkeypatch.setattr(forward, "run", counted)
    return seen


def test_every_complete_answer_validates(engine: KVBoost) -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(schema=schemas(), seed=st.integers(0, 2**32))
    def answer(schema: Any, seed: int) -> None:
        try:
            result = engine.generate(
                "Answer:", 400, schema=schema, temperature=1.5, seed=seed, keep=False
            )
        except StructuredOutputError as error:  # nothing satisfies it
            outcomes["refused"] += 1
            assert "schema cannot be enforced" in str(error)
            return
        outcomes[result.finish_reason] += 1
        if result.finish_reason == "stop":
            value = json.loads(result.output_text)
            jsonschema_rs.validate(schema, value, validate_formats=True)

    answer()
    assert outcomes["stop"] >= 0.9 * outcomes.total(), outcomes


def test_a_model_of_pydantics_reads_its_answer(engine: KVBoost) -> None:
    result = engine.chat([{"role": "user", "content": "Who?"}], 200, schema=Person)
    assert Person.model_validate_json(result.output_text).age <= 99


@pytest.mark.parametrize(
    ("options", "matches"),
    [
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"choice": ["red", "green", "gré\n"]}, "red|green|gré\n"),
        ({"grammar": 'start: "a" num\nnum: /[0-9]{2}/'}, "a[0-9]{2}"),
        ({"grammar": 'root ::= "x" [0-9]'}, "x[0-9]"),
    ],
)
def test_other_formats(engine: KVBoost, options, matches: str) -> None:
    for seed in range(4):
        result = engine.generate("Say", 30, temperature=1.5, seed=seed, **options)
        assert re.fullmatch(matches, result.output_text) and result.finish_reason == "stop"


def test_forced_tokens_are_rows_of_one_forward(engine: KVBoost, forwards) -> None:
    result = engine.generate("Who is it?", 100, schema=PERSON, keep=False)
    prompt, first, *others = forwards
    assert prompt == [len("Who is it?")]
    assert first == [len('{"name": "')]
    assert [rows for rows in others if rows != [1]]  # '", "age": ' after the name
    assert len(forwards) < len(result.token_ids) - 15


def test_with_log_probabilities_every_token_is_described(engine: KVBoost, forwards) -> None:
    result = engine.generate("Who is it?", 100, schema=PERSON, logprobs=1, keep=False)
    assert result.logprobs is not None and len(result.logprobs) == len(result.token_ids)
    with engine.stream("Who is it?", 100, schema=PERSON) as stream:
        assert "".join(stream) == result.output_text
    assert all(rows == [1] for rows in forwards[1 : len(result.token_ids)])


def test_penalties_count_forced_tokens(engine: KVBoost) -> None:
    """With and without forcing, the same tokens are seen, so the same are chosen."""
    options: Any = {"schema": PERSON, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    forced = engine.generate("Who?", 100, **options)
    chosen = engine.generate("Who?", 100, logprobs=0, **options)
    assert forced.token_ids == chosen.token_ids


def test_the_limit_ends_an_answer_among_forced_tokens(engine: KVBoost) -> None:
    result = engine.generate("Who?", 5, schema=PERSON)
    assert result.output_text == '{"nam' and result.finish_reason == "length"
    assert len(result.token_ids) == 5
    whole = engine.generate("Who?", 100, choice=["abc"])
    assert whole.finish_reason == "stop"
    assert engine.generate("Who?", 3, choice=["abc"]).finish_reason == "stop"
    assert engine.generate("Who?", 2, choice=["abc"]).finish_reason == "length"


def test_a_stop_string_ends_an_answer_among_forced_tokens(engine: KVBoost) -> None:
    result = engine.generate("Who?", 100, schema=PERSON, stop='me"')
    assert result.output_text == '{"na' and result.finish_reason == "stop"


def test_reasoning_before_a_schema(engine: KVBoost) -> None:
    grammar = after_reasoning(json_grammar(PERSON), begun=False)
    bias = {engine.encode("{")[0]: 100.0, engine.encode("<")[0]: -100.0}
    answer = engine.generate("Who?", 100, grammar=grammar, logit_bias=bias).output_text
    assert json.loads(answer).keys() == {"name", "age"}


def test_a_batch_of_mixed_requests_leaves_the_others_as_they_are(engine: KVBoost) -> None:
    prompts = [f"Question {number}: who was it?" for number in range(8)]
    formats: list[Any] = [
        {},
        {"schema": PERSON},
        {},
        {"regex": "[ab]{20}"},
        {},
        {"choice": ["a long choice that is forced", "another"]},
        {},
        {"schema": PERSON, "temperature": 1.5, "seed": 7},
    ]
    free = [number for number, options in enumerate(formats) if not options]
    alone = engine.generate_batch([prompts[number] for number in free], 40, keep=False)
    mixed = engine.generate_batch(prompts, 40, each=formats, keep=False)
    assert [mixed[number].token_ids for number in free] == [one.token_ids for one in alone]
    for number, options in enumerate(formats):
        if options:
            single = engine.generate(prompts[number], 40, keep=False, **options)
            assert mixed[number].token_ids == single.token_ids


def test_the_next_turn_finds_the_rows_of_forced_tokens(engine: KVBoost) -> None:
    prompt = "Who wrote it, and when?"
    first = engine.generate(prompt, 100, schema=PERSON)
    follow = engine.generate(prompt + first.output_text + " And then?", 4)
    # Its last digit and the bracket that this forces ended the answer and have no rows.
    assert follow.exact_tokens >= len(prompt) + len(first.token_ids) - 2
    fresh = engine.generate(prompt + first.output_text + " And then?", 4, "baseline")
    assert follow.token_ids == fresh.token_ids


def test_forced_tokens_may_cross_the_limit_of_longrope() -> None:
    prompt = "x" * 50
    with make_engine(longrope_model(), strict=False) as engine:
        forced = engine.generate(prompt, 60, choice=["y" * 30 + "a", "y" * 30 + "b"])
        chosen = engine.generate(prompt, 60, choice=["y" * 30 + "a", "y" * 30 + "b"], logprobs=0)
    assert forced.token_ids == chosen.token_ids and len(forced.token_ids) == 31


def test_special_tokens_in_the_text(engine: KVBoost) -> None:
    bias = {EOS: 100.0}
    text = engine.generate("x", 2, ignore_eos=True, logit_bias=bias, skip_special_tokens=False)
    assert text.output_text == "<eos><eos>"
    ended = engine.generate("x", 2, logit_bias=bias, skip_special_tokens=False)
    assert ended.output_text == "" and ended.finish_reason == "stop"


def test_a_format_and_ignore_eos_do_not_go_together(engine: KVBoost) -> None:
    with pytest.raises(ValueError, match="ignore_eos=True does not go with a format"):
        engine.generate("x", 4, regex="a+", ignore_eos=True)


def test_a_schema_that_cannot_be_enforced_is_refused_before_it_runs(engine: KVBoost) -> None:
    with pytest.raises(StructuredOutputError, match=r'schema cannot be enforced: .*"not"'):
        engine.generate("x", 4, schema={"not": {}})


def test_a_verified_answer_in_a_format_is_read_exactly(engine: KVBoost) -> None:
    passage = "The keeper of the lighthouse counts the ships that pass by the rocks. " * 3
    engine.warm(passage)
    asked = {"regex": "[a-c]{6}", "cache_salt": "", "reuse_moved": "always"}
    moved = engine.generate(f"Read this: {passage}", 12, keep=False, **asked)
    exact = engine.generate(f"Read this: {passage}", 12, "prefix_cache", keep=False, **asked)
    result = engine.generate(f"Read this: {passage}", 12, exactness="verified", **asked)
    assert moved.moved_tokens > 0 and result.moved_tokens == 0
    assert result.token_ids == exact.token_ids and result.answer_exact_from == 0
