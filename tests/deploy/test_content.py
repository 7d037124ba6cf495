"""What the router sees of a request: its beginning, its passages, and nothing of other tenants."""

from __future__ import annotations

import json
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost.deploy.content import (
    BLOCK_TOKENS,
    MARK_TOKENS,
    MAX_TOKENS,
    NOTHING,
    Sketch,
    sketch,
    tenant_of,
    word_ids,
)
from support.passages import of, text


def shared(one: Sketch, other: Sketch) -> float:
    """The share of the marks of ``one`` that ``other`` has."""
    return len(set(one.marks) & set(other.marks)) / len(set(one.marks))


def test_a_passage_has_the_same_marks_wherever_it_is() -> None:
    passage = text("passage")
    alone, inside = of(passage), of(f"{text('before', 37)} {passage}\n{text('after', 11)}")
    assert len(alone.marks) > 10 and shared(alone, inside) > 0.9
    assert shared(alone, of(text("another"))) == 0.0


def test_only_a_common_beginning_has_common_blocks() -> None:
    long = text("a document", 800)
    first, second = of(f"{long} What is it?"), of(f"{long} Who wrote it?")
    same = [a == b for a, b in zip(first.blocks, second.blocks, strict=False)]
    assert sum(same) >= len(same) - 1 and all(same[: len(same) - 1])
    assert not set(first.blocks) & set(of(f"x{long}").blocks)


def test_there_is_about_one_mark_for_ten_tokens_and_a_block_for_64() -> None:
    seen = of(text("long", 20_000))
    ids = of([number * 7919 % 30_000 for number in range(20_000)])
    for one in (seen, ids):
        assert 0.5 < one.tokens / len(one.marks) / MARK_TOKENS < 2
    assert seen.tokens // len(seen.blocks) == BLOCK_TOKENS
    assert list(seen.places) == sorted(seen.places) and seen.places[-1] < seen.tokens


def test_token_ids_need_no_text() -> None:
    rng = random.Random(0)
    ids = [rng.randrange(30_000) for _ in range(1000)]
    alone, moved = of(ids), of([1, 2, 3, *ids])
    assert alone.tokens == 1000 and shared(alone, moved) > 0.9
    assert alone.blocks[0] not in moved.blocks
    assert of([ids[:500], ids[500:]]).tokens == 1000


def test_chats_are_read_in_order_and_so_are_parts_and_tools() -> None:
    system, question = text("system"), text("question")
    plain = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    parts = [plain[0], {"role": "user", "content": [{"type": "text", "text": question}]}]
    as_chat = sketch(json.dumps({"messages": plain}).encode())
    assert as_chat == sketch(json.dumps({"messages": parts}).encode())
    assert shared(of(question), as_chat) > 0.9
    other = [plain[0], {"role": "user", "content": "Why?"}]
    again = sketch(json.dumps({"messages": other}).encode())
    assert again.blocks[0] == as_chat.blocks[0]
    tools = sketch(json.dumps({"messages": plain, "tools": [{"type": "function"}]}).encode())
    assert tools.blocks[0] != as_chat.blocks[0]


def test_tenants_and_salts_share_nothing() -> None:
    ann, bob = tenant_of(b"Bearer k-ann"), tenant_of(b"Bearer k-bob")
    assert b"k-ann" not in ann and tenant_of(None) == tenant_of(b"") == b""
    body = json.dumps({"prompt": text("mine")}).encode()
    salted = json.dumps({"prompt": text("mine"), "cache_salt": "7"}).encode()
    seen = [
        sketch(body),
        sketch(body, ann),
        sketch(body, bob),
        sketch(salted),
        sketch(salted, ann),
    ]
    assert len({one.tokens for one in seen}) == 1
    for number, one in enumerate(seen):
        for other in seen[number + 1 :]:
            assert not set(one.blocks) & set(other.blocks)
            assert not set(one.marks) & set(other.marks)


@pytest.mark.parametrize(
    ("mode", "allowed"),
    [(None, "content"), ("baseline", "nothing"), ("prefix_cache", "beginning"), (7, "content")],
)
def test_a_request_may_reuse_less(mode: object, allowed: str) -> None:
    assert of("text", kvboost={"mode": mode}).reuses == allowed


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", b"{", b'"prompt"', b"{}", b'{"prompt": ""}', b"\xff\xfe", b"[" * 100_000),
        *(b'{"messages": 7}', b'{"prompt": {"a": 1}}', b'{"messages": []}'),
    ],
    ids=lambda body: body[:12],
)
def test_what_has_no_prompt_says_nothing(body: bytes) -> None:
    assert sketch(body) == NOTHING


@pytest.mark.parametrize("ids", [[[0, 1]] * 50, [[]] * 50, [[[1]] * 64] * 64])
def test_lists_of_lists_of_lists_are_no_token_ids(ids: list[object]) -> None:
    assert of([ids]) == Sketch(model=of("text").model)


def test_a_body_of_any_depth_is_read_or_not() -> None:
    """Python parses some that it cannot write again. How deep these are depends on the caller."""
    for depth in range(sys.getrecursionlimit() - 200, sys.getrecursionlimit() + 50):
        tools = b"[" * depth + b"]" * depth
        assert isinstance(sketch(b'{"tools": %s}' % tools), Sketch)


def test_odd_prompts_do_not_raise() -> None:
    for prompt in ([1, "a"], [[1], [None]], [10**30], ["\ud800"], [{"text": 3}], [True, 2]):
        assert isinstance(of(prompt), Sketch)


def test_a_huge_prompt_is_looked_at_only_so_far() -> None:
    assert of("x " * (3 * MAX_TOKENS)).tokens == MAX_TOKENS


@given(st.text(min_size=1), st.randoms())
def test_words_cover_a_text_and_are_the_same_in_any_other(inner: str, rng) -> None:
    data = f" {inner} ".encode("utf-8", "replace")
    starts, words = word_ids(data)
    assert starts[0] == 0 and len(starts) == len(words) and list(starts) == sorted(set(starts))
    before = f"{text(rng.random(), 5)} ".encode()
    after = word_ids(before + data)[1]
    assert len(words) < 2 or list(after[-len(words) + 1 :]) == list(words[1:])


def test_languages_without_spaces_have_marks_too() -> None:
    rng = random.Random(0)
    chinese = "".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(600))
    alone, inside = of(chinese), of(f"前文{chinese[300:]}。{chinese[:300]}")
    assert len(alone.marks) > 30 and shared(alone, inside) > 0.8


def test_other_apis_are_sketched_like_chat() -> None:
    """The text of Anthropic's, Ollama's and the Responses API is recognised at its beginning."""
    text, question = "The lighthouse keeper wrote in his book. " * 30, "Why?"
    turns = [{"role": "user", "content": question}]
    blocks = [{"type": "text", "text": text}]
    anthropic = sketch(json.dumps({"system": blocks, "messages": turns}).encode())
    assert anthropic == sketch(json.dumps({"instructions": text, "input": turns}).encode())
    assert len(anthropic.blocks) >= 4 and anthropic.marks
    as_text = sketch(json.dumps({"instructions": text, "input": question}).encode())
    assert as_text.blocks[:4] == anthropic.blocks[:4]
    generate = sketch(json.dumps({"prompt": question, "system": text}).encode())
    assert generate.blocks[:4] == anthropic.blocks[:4]
    result = {"type": "function_call_output", "call_id": "1", "output": text}
    assert sketch(json.dumps({"input": [result]}).encode()).marks
