"""Requests of many sizes before the first real one.

On a GPU, each size of a step, probe or repair is a CUDA graph, which takes about 0.3 s to record.
Users who come to a server that has just started would wait for it, all of them each time.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import suppress

from kvboost.checks.engine import Engine
from kvboost.config import GenerationMode
from kvboost.errors import ForgetError, KVBoostError
from kvboost.runtime.options import RequestOptions

log = logging.getLogger("kvboost")

SALT = "kvboost-rehearsal"
STEPS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Requests that answer at the same time."""
DOCUMENTS = 8
DOCUMENT_TOKENS = 256
QUESTION_TOKENS = 48
RATIOS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
OPTIONS: RequestOptions = {
    "cache_salt": SALT,
    "ignore_eos": True,
    "speculate": "off",  # what random tokens teach about drafts would be wrong
    "heal": "off",
}


def rehearse(engine: Engine, max_running: int) -> None:
    """Answers made-up prompts of many sizes and forgets them. A failure is logged: what was not
    rehearsed is recorded when users need it."""
    try:
        _answer(engine, max_running)
    except KVBoostError as error:
        log.warning("the rehearsal ended early: %s", error)
    finally:
        with suppress(ForgetError):  # what is left of made-up prompts harms nobody
            engine.forget_salt(SALT)


def _answer(engine: Engine, max_running: int) -> None:
    text = _tokens(engine)
    for number in sorted({min(step, max_running) for step in STEPS}, reverse=True):
        prompts = [_some(text, QUESTION_TOKENS) for _ in range(number)]
        engine.generate_batch(prompts, 4, GenerationMode.PREFIX_CACHE, **OPTIONS)
    longest = (engine.context_length or 1 << 20) - QUESTION_TOKENS - 8
    length = min(DOCUMENT_TOKENS, longest // DOCUMENTS)
    documents = [_some(text, length) for _ in range(DOCUMENTS)]
    engine.generate(_joined(documents, text), 2, **OPTIONS)
    for number in (DOCUMENTS, DOCUMENTS // 2):
        for first, ratio in enumerate(RATIOS, 1):  # each in an order of its own
            order = [*documents[first:], *documents[:first]][::-1][-number:]
            options: RequestOptions = {**OPTIONS, "recompute_ratio": ratio}
            engine.generate(_joined(order, text), 2, **options)


def _joined(documents: Sequence[list[int]], text: Iterator[int]) -> list[int]:
    """Documents and a question."""
    tokens = [token for document in documents for token in document]
    return tokens + _some(text, QUESTION_TOKENS)


def _tokens(engine: Engine) -> Iterator[int]:
    """Token ids without end, the same every time."""
    chosen = random.Random(0)
    while True:
        yield chosen.randrange(engine.vocab_size)


def _some(text: Iterator[int], number: int) -> list[int]:
    return [next(text) for _ in range(number)]
