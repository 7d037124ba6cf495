from __future__ import annotations

from kvboost.bench.agent.traced import WINDOW, choose_checked, trace_session
from kvboost.bench.texts.trace import Request, Session


def session(*texts: str, kind: str = "coder", first_line: int = 1) -> Session:
    lines = enumerate(texts, start=first_line)
    return Session(kind, "one", [Request(line, text) for line, text in lines])


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def numbered(start: int, count: int) -> str:
    """Text in which no window occurs twice."""
    return "".join(chr(1000 + start + number) for number in range(count))


def test_a_prefix_cache_finds_what_any_earlier_prompt_begins_with() -> None:
    texts = ("abcdef", "xyz", "abcxx", "abcdefg", "abcdefg")
    prompts = trace_session(session(*texts), letters, 100).prompts
    assert [one.prefix_tokens for one in prompts] == [0, 0, 3, 6, 6]
    assert [one.ideal_tokens for one in prompts] == [6, 3, 2, 1, 1]
    assert not any(one.elsewhere_tokens for one in prompts)


def test_text_after_an_edit_is_known_elsewhere() -> None:
    head, middle, tail = numbered(0, 10), numbered(100, 5), numbered(200, 2 * WINDOW)
    before, after = trace_session(session(head + middle + tail, head + tail), letters, 999).prompts
    assert before.elsewhere_tokens == 0 and not before.can_move
    assert after.prefix_tokens == len(head)
    assert after.elsewhere_tokens == len(tail) - 1, "the last token is always computed"


def test_fewer_than_a_window_are_not_known_elsewhere() -> None:
    part = numbered(0, WINDOW)
    short, whole = (
        trace_session(session(part, "x" + part[:length] + "y"), letters, 999).prompts[1]
        for length in (WINDOW - 1, WINDOW)
    )
    assert short.elsewhere_tokens == 0 and whole.elsewhere_tokens == WINDOW


def test_an_answer_is_known_from_then_on() -> None:
    asked, answer = numbered(0, 10), numbered(100, 2 * WINDOW)
    lines = [Request(1, asked, answer), Request(2, asked + answer + "x"), Request(3, "y" + answer)]
    _, continued, quoted = trace_session(Session("coder", "one", lines), letters, 999).prompts
    assert continued.prefix_tokens == len(asked + answer)
    assert quoted.prefix_tokens == 0 and quoted.elsewhere_tokens == len(answer) - 1


def test_requests_that_cannot_be_sent_are_counted() -> None:
    found = trace_session(session("abc", "", "abcdef", "abcd"), letters, 4)
    assert [one.text for one in found.prompts] == ["abc", "abcd"]
    assert (found.too_long, found.empty) == (1, 1)
    assert found.prompts[1].prefix_tokens == 3


def test_checked_turns_can_move_text_and_are_spread_over_the_kinds() -> None:
    tail = numbered(0, 2 * WINDOW)
    texts = (tail, *(f"{number} {tail}" for number in range(4)))
    ours = [
        trace_session(session(*texts, kind=kind, first_line=line), letters, 999)
        for kind, line in (("a", 1), ("b", 11))
    ]
    chosen = choose_checked(ours, 4, 0)
    assert len(chosen & {2, 3, 4, 5}) == len(chosen & {12, 13, 14, 15}) == 2
    assert chosen == choose_checked(ours, 4, 0) != choose_checked(ours, 4, 1)
    assert choose_checked(ours, 99, 0) == {2, 3, 4, 5, 12, 13, 14, 15}
