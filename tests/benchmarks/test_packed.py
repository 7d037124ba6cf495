"""The prompts of ``benchmarks/packed.py``: what is known of them, and what is not."""

from __future__ import annotations

from benchmarks import packed as bench

PROMPTS = bench.Prompts(list(range(1000, 9000)))


def common(first: list[int], second: list[int]) -> int:
    """Tokens that two prompts begin with."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(first))


def test_prompts_to_read_share_no_beginning() -> None:
    prompts = [PROMPTS.known(rows, number, 0) for rows in (512, 2048) for number in range(2)]
    assert [len(prompt) for prompt in prompts] == [512, 512, 2048, 2048]
    for index, prompt in enumerate(prompts):
        assert all(common(prompt, other) <= 1 for other in prompts[:index])


def test_a_warm_prompt_differs_in_its_question_only() -> None:
    first, second = PROMPTS.known(2048, 0, 0), PROMPTS.known(2048, 0, 1)
    assert common(first, second) == 2048 - bench.QUESTION


def test_moved_passages_are_known_and_in_another_order() -> None:
    known, moved = PROMPTS.known(2048, 0, 0), PROMPTS.moved(1024, 0, 2, 2048)
    assert len(moved) == 1024 and common(known, moved) == bench.HEAD
    body = moved[bench.HEAD : -bench.QUESTION]
    assert set(body) <= set(known) and body != sorted(body)
    for start in range(0, len(body) - bench.PASSAGE, bench.PASSAGE):
        passage = body[start : start + bench.PASSAGE]
        assert passage == list(range(passage[0], passage[0] + bench.PASSAGE))
