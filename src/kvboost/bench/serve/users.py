"""The prompts of a server's users, seeded: the same requests for every server.

``rag``     eight passages of a pool, popular ones more often, in an order that changes, and a
            question that is new: some 3,000 tokens
``rag-8k``  the same with longer passages: some 8,000 tokens
``chat``    conversations that grow over turns, after one long system prompt
``agent``   an agent's growing history, in which old results are cleared

A request is a list of chat messages. One that continues a conversation follows the server's own
answer, as in real life: these words differ from server to server, and nothing else does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Protocol
from zlib import crc32

from kvboost.bench.texts.prompts import QUESTIONS
from kvboost.config import one_of, whole
from kvboost.errors import ConfigError

Count = Callable[[str], int]
"""Counts the tokens of a text."""
Message = dict[str, str]
Passage = tuple[str, str]
"""A title and a text."""

FEWEST_PASSAGES, MOST_PASSAGES, PASSAGES_OF_A_USER = 12, 64, 4
"""The pool has four passages for each user, within these limits."""
PASSAGES_OF_A_PROMPT = 8
PASSAGE_TOKENS, LONG_PASSAGE_TOKENS = 384, 960
POPULARITY = 0.7
"""The exponent of a Zipf distribution."""
SYSTEM_TOKENS = 1024
TURN_TOKENS = (256, 384)
TURNS = 6
"""A conversation ends after this many, and the user begins another."""
AGENT_TOKENS = 1536
RESULT_TOKENS = 704
KEPT_RESULTS = 3
"""Of an agent's results; older ones are cleared."""
WARMUPS = 4

RAG_RULES = "Answer the question from the passages. If they do not say it, say so."
CLEARED = "[cleared]"


@dataclass(frozen=True)
class Request:
    """One thing a user sends."""

    messages: tuple[Message, ...]
    continues: bool = False
    """Whether the messages follow the answer to the user's request before."""


@dataclass(frozen=True)
class Workload:
    """The prompts of each user, one request after the other."""

    name: str
    users: tuple[tuple[Request, ...], ...]
    warmup: tuple[tuple[Request, ...], ...]
    """Sent before the clock runs, by as many users as there are entries."""

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.users))


class Maker(Protocol):
    """Makes the requests of one workload."""

    def requests(self, number: int) -> Iterator[Request]:
        """The prompts of one user."""

    def warmup(self, user: int) -> Iterator[Request]:
        """The prompts of one of the ``WARMUPS`` users, before the clock runs."""


def make_workload(
    name: str,
    found: Sequence[Passage],
    count_tokens: Count,
    *,
    users: int,
    requests: int,
    seed: int,
) -> Workload:
    """``requests`` requests of each of ``users`` users, made of the text in ``found``."""
    one_of(name, tuple(WORKLOADS), "load")
    whole(users, 1, "users")
    whole(requests, 1, "requests")
    rng = random.Random(f"{name} {seed} {users}")
    maker = WORKLOADS[name](rng, Texts(found, count_tokens, rng, name), users)
    return Workload(
        name,
        tuple(tuple(maker.requests(requests)) for _ in range(users)),
        tuple(tuple(maker.warmup(user)) for user in range(WARMUPS)),
    )


class Texts:
    """Passages of given lengths. Each workload has its own share of the text: what one left in a
    server's cache is of no use to the next. Text that is used up comes again with a number."""

    def __init__(
        self, found: Sequence[Passage], count_tokens: Count, rng: random.Random, workload: str
    ) -> None:
        self._count = count_tokens
        number = list(WORKLOADS).index(workload)
        self._found = [one for one in found if crc32(one[1].encode()) % len(WORKLOADS) == number]
        if not self._found:
            raise ConfigError(
                f"{len(found)} passages are too few: none is left for the load {workload!r}; "
                "give a file with more of them"
            )
        rng.shuffle(self._found)
        self._next = 0

    def passage(self, num_tokens: int) -> Passage:
        """A title and about ``num_tokens`` tokens, never more."""
        title, pieces = self._take()
        while self._count(pieces) < num_tokens:
            pieces += "\n\n" + self._take()[1]
        return title, self.cut(pieces, num_tokens)

    def cut(self, text: str, num_tokens: int) -> str:
        """A beginning of ``text``, in whole words, of at most ``num_tokens`` tokens and not much
        less."""
        while (has := self._count(text)) > num_tokens:
            text = text[: len(text) * num_tokens // has].rsplit(None, 1)[0]
        return text

    def _take(self) -> Passage:
        title, text = self._found[self._next % len(self._found)]
        again = self._next // len(self._found)
        self._next += 1
        return (f"{title} ({again})", f"{again}. {text}") if again else (title, text)


class Rag:
    """Questions over a pool of passages."""

    def __init__(self, rng: random.Random, texts: Texts, users: int, *, tokens: int) -> None:
        self._rng = rng
        passages = min(MOST_PASSAGES, max(FEWEST_PASSAGES, PASSAGES_OF_A_USER * users))
        self._pool = [texts.passage(tokens) for _ in range(passages)]
        self._weights = [(rank + 1) ** -POPULARITY for rank in range(passages)]
        self._numbers = count(1)

    def requests(self, number: int) -> Iterator[Request]:
        for _ in range(number):
            chosen: dict[Passage, None] = {}
            while len(chosen) < PASSAGES_OF_A_PROMPT:
                chosen[self._rng.choices(self._pool, self._weights)[0]] = None
            yield self._ask(list(chosen))

    def warmup(self, user: int) -> Iterator[Request]:
        """Together the warm-up requests show every passage at least once."""
        size = PASSAGES_OF_A_PROMPT
        for first in range(user * size, len(self._pool), WARMUPS * size):
            yield self._ask([self._pool[(first + at) % len(self._pool)] for at in range(size)])

    def _ask(self, passages: list[Passage]) -> Request:
        title, text = self._rng.choice(passages)
        words = sorted({word for word in text.split() if word.isalpha() and len(word) > 4})
        about = " and ".join(self._rng.sample(words, min(2, len(words))))
        question = f"Question {next(self._numbers)}: what does {title} have to do with {about}? "
        shown = "\n\n".join(f"{title}\n{text}" for title, text in passages)
        content = f"{shown}\n\n{question}{self._rng.choice(QUESTIONS)}"
        return Request((_message("system", RAG_RULES), _message("user", content)))


class Chat:
    """Conversations that begin with the same system prompt."""

    def __init__(self, rng: random.Random, texts: Texts, users: int) -> None:
        self._rng = rng
        self._texts = texts
        rules = "You are the support assistant of a Python course. Rules and reference:\n\n"
        self._system = _message("system", rules + texts.passage(SYSTEM_TOKENS - 16)[1])

    def requests(self, number: int) -> Iterator[Request]:
        for turn in range(number):
            title, text = self._texts.passage(self._rng.randint(*TURN_TOKENS))
            asked = _message("user", f"About {title}: {text}\n{self._rng.choice(QUESTIONS)}")
            begins = turn % TURNS == 0
            yield Request((self._system, asked) if begins else (asked,), continues=not begins)

    def warmup(self, user: int) -> Iterator[Request]:
        yield from self.requests(2)


class Agent:
    """Histories of an agent's steps. They grow, and in every turn an old result is cleared, so that
    the text after it moves."""

    def __init__(self, rng: random.Random, texts: Texts, users: int) -> None:
        self._rng = rng
        self._texts = texts
        rules = "You are an agent that works in steps. Rules and reference:\n\n"
        self._system = _message("system", rules + texts.passage(AGENT_TOKENS - 16)[1])

    def requests(self, number: int) -> Iterator[Request]:
        results: list[str] = []
        for turn in range(number):
            results.append(self._texts.passage(RESULT_TOKENS)[1])
            messages = [self._system]
            for at, result in enumerate(results):
                shown = CLEARED if at <= turn - KEPT_RESULTS else result
                messages.append(_message("user", f"Result {at + 1}:\n{shown}"))
                messages.append(_message("assistant", f"Step {at + 1} is done, I go on."))
            messages.append(_message("user", self._rng.choice(QUESTIONS)))
            yield Request(tuple(messages))

    def warmup(self, user: int) -> Iterator[Request]:
        yield from self.requests(2)


WORKLOADS: dict[str, Callable[[random.Random, Texts, int], Maker]] = {
    "rag": partial(Rag, tokens=PASSAGE_TOKENS),
    "rag-8k": partial(Rag, tokens=LONG_PASSAGE_TOKENS),
    "chat": Chat,
    "agent": Agent,
}


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
