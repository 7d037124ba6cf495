"""What the users of a server send, seeded: the same requests for every server.

``rag``    6 to 8 of 12 passages, in an order that changes, and a question that is new
``chat``   conversations that grow over turns, after one long system prompt

A request is a list of chat messages. One that continues a conversation follows the server's own
answer, as in real life: these words differ from server to server, and nothing else does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from zlib import crc32

from kvboost.bench.texts.prompts import QUESTIONS, docstrings
from kvboost.config import one_of, whole

Count = Callable[[str], int]
"""How many tokens a text has."""
Message = dict[str, str]

PASSAGES = 12
PASSAGE_TOKENS = 256
PASSAGES_OF_A_PROMPT = (6, 8)
SYSTEM_TOKENS = 1024
TURNS = 6
"""A conversation ends after this many, and the user begins another."""
WARMUPS = 4

RAG_RULES = "Answer the question from the passages. If they do not say it, say so."


@dataclass(frozen=True)
class Request:
    """One thing a user sends."""

    messages: tuple[Message, ...]
    continues: bool = False
    """Whether the messages follow the answer to the user's request before."""


@dataclass(frozen=True)
class Workload:
    """What each user sends, one request after the other."""

    name: str
    users: tuple[tuple[Request, ...], ...]
    warmup: tuple[tuple[Request, ...], ...]
    """Sent before the clock runs, by as many users as there are entries."""

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.users))


def make_workload(
    name: str,
    count_tokens: Count,
    *,
    users: int,
    requests: int,
    seed: int,
    passage_tokens: int = PASSAGE_TOKENS,
) -> Workload:
    """``requests`` requests of each of ``users`` users."""
    one_of(name, tuple(WORKLOADS), "workload")
    whole(users, 1, "users")
    whole(requests, 1, "requests")
    rng = random.Random(f"{name} {seed} {users}")
    maker = WORKLOADS[name](rng, Texts(count_tokens, rng, name, passage_tokens))
    return Workload(
        name,
        tuple(tuple(maker.requests(requests)) for _ in range(users)),
        tuple(tuple(maker.warmup(user)) for user in range(WARMUPS)),
    )


class Texts:
    """Passages of given lengths, cut from text that every Python has. Each workload has its own
    texts: what one left in a server's cache is of no use to the next."""

    def __init__(
        self, count_tokens: Count, rng: random.Random, workload: str, passage_tokens: int
    ) -> None:
        self.passage_tokens = passage_tokens
        self._count = count_tokens
        number = list(WORKLOADS).index(workload)
        self._found = [
            found for found in docstrings() if crc32(found[0].encode()) % len(WORKLOADS) == number
        ]
        rng.shuffle(self._found)
        self._next = 0

    def passage(self, num_tokens: int) -> tuple[str, str]:
        """A title and about ``num_tokens`` tokens, never more, that no other passage has."""
        title, pieces = self._take()
        while self._count(pieces) < num_tokens:
            pieces += "\n\n" + self._take()[1]
        return title, self.cut(pieces, num_tokens)

    def cut(self, text: str, num_tokens: int) -> str:
        """The longest beginning of ``text``, in whole words, of at most ``num_tokens`` tokens."""
        ends = [end for end, sign in enumerate(text) if sign.isspace()] + [len(text)]
        low, high = 0, len(ends) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(text[: ends[middle]]) <= num_tokens:
                low = middle
            else:
                high = middle - 1
        return text[: ends[low]].rstrip()

    def _take(self) -> tuple[str, str]:
        title, text = self._found[self._next % len(self._found)]
        again = self._next // len(self._found)
        self._next += 1
        return (f"{title} ({again})", f"{again}. {text}") if again else (title, text)


class Rag:
    """Questions over a pool of passages."""

    def __init__(self, rng: random.Random, texts: Texts) -> None:
        self._rng = rng
        self._pool = [texts.passage(texts.passage_tokens) for _ in range(PASSAGES)]
        self._numbers = count(1)

    def requests(self, number: int) -> Iterator[Request]:
        for _ in range(number):
            least, most = PASSAGES_OF_A_PROMPT
            yield self._ask(self._rng.sample(self._pool, self._rng.randint(least, most)))

    def warmup(self, user: int) -> Iterator[Request]:
        """Together the warm-up requests show every passage at least once."""
        most = PASSAGES_OF_A_PROMPT[1]
        yield self._ask([self._pool[(user * (most + 1) + at) % PASSAGES] for at in range(most)])

    def _ask(self, passages: list[tuple[str, str]]) -> Request:
        title, text = self._rng.choice(passages)
        words = sorted({word for word in text.split() if word.isalpha() and len(word) > 4})
        about = " and ".join(self._rng.sample(words, min(2, len(words))))
        question = f"Question {next(self._numbers)}: what does {title} have to do with {about}? "
        shown = "\n\n".join(f"{title}\n{text}" for title, text in passages)
        content = f"{shown}\n\n{question}{self._rng.choice(QUESTIONS)}"
        return Request((_system(RAG_RULES), _user(content)))


class Chat:
    """Conversations that begin with the same system prompt."""

    def __init__(self, rng: random.Random, texts: Texts) -> None:
        self._rng = rng
        self._texts = texts
        rules = "You are the support assistant of a Python course. Rules and reference:\n\n"
        self._system = _system(rules + texts.passage(SYSTEM_TOKENS - 16)[1])

    def requests(self, number: int) -> Iterator[Request]:
        for turn in range(number):
            title, text = self._texts.passage(self._rng.randint(24, 72))
            content = f"About {title}: {text}\n{self._rng.choice(QUESTIONS)}"
            begins = turn % TURNS == 0
            messages = (self._system, _user(content)) if begins else (_user(content),)
            yield Request(messages, continues=not begins)

    def warmup(self, user: int) -> Iterator[Request]:
        yield from self.requests(2)


WORKLOADS: dict[str, Callable[[random.Random, Texts], Rag | Chat]] = {"rag": Rag, "chat": Chat}


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
