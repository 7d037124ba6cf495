"""A conversation turn by turn. All contenders get the same prompts.

The answers in the prompts were written beforehand, so they are new to every contender.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from kvboost import GenerationMode, KVBoost, StockModel
from kvboost.bench.kit.timing import Sample
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.texts.prompts import MAX_QUESTIONS, Encode, Unread, fragments, question

TURNS = 10
QUESTION_TOKENS = 32
ANSWER_TOKENS = 64
EARLY, LATE = 2, 8
"""The turns whose times should not differ by much."""

Ask = Callable[[int, list[int]], float | None]
"""Turn (from 1) and prompt to milliseconds; None if no answer came."""


@dataclass(frozen=True)
class Chat:
    """Milliseconds to the first token of every turn, by contender."""

    prompt_tokens: tuple[int, ...]
    turns: Mapping[str, Sequence[Sample]]

    def growth(self, name: str) -> float | None:
        """The time of a late turn, divided by that of an early one."""
        samples = self.turns[name]
        if len(samples) < LATE:
            return None
        return samples[LATE - 1].median_ms / samples[EARLY - 1].median_ms

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"growth": {name: self.growth(name) for name in self.turns}}


def conversation(
    encode: Encode, unread: Unread, number: int, opening_tokens: int, turns: int
) -> list[list[int]]:
    """The prompts of a conversation that shares no text with any other."""
    talk = unread.take(opening_tokens)
    prompts = []
    for turn in range(turns):
        talk = talk + question(encode, (number + turn) % MAX_QUESTIONS, QUESTION_TOKENS)
        prompts.append(talk)
        talk = talk + unread.take(ANSWER_TOKENS)
    return prompts


def measure_chat(
    engine: KVBoost,
    stock: StockModel,
    peers: Contenders | None = None,
    *,
    opening_tokens: int = 1024,
    turns: int = TURNS,
    conversations: int = 5,
    on_turn: Callable[[], None] = lambda: None,
) -> Chat:
    """The first turn of every contender, then the second of each. The first conversation warms up
    and does not count. A peer that fails on the way is left out."""
    encode = fragments(engine.encode)
    unread = Unread(encode)
    times: dict[str, list[list[float]]] = {}
    lengths: tuple[int, ...] = ()
    for number in range(conversations + 1):
        prompts = conversation(encode, unread, number, opening_tokens, turns)
        lengths = tuple(len(prompt) for prompt in prompts)
        with _contenders(engine, stock, peers, f"chat-{number}") as contenders:
            for turn, prompt in enumerate(prompts, start=1):
                names = list(contenders)
                for name in names if turn % 2 else reversed(names):
                    elapsed = contenders[name](turn, prompt)
                    if number and elapsed is not None:
                        own = times.setdefault(name, [[] for _ in prompts])
                        own[turn - 1].append(elapsed)
                on_turn()
    whole = {name: own for name, own in times.items() if all(own)}
    return Chat(lengths, {name: [Sample.of(one) for one in own] for name, own in whole.items()})


@contextmanager
def _contenders(
    engine: KVBoost, stock: StockModel, peers: Contenders | None, salt: str
) -> Iterator[dict[str, Ask]]:
    """The contenders of one conversation; each has its own cache of it."""
    names = ("baseline", "prefix", "chunk")
    found: dict[str, Ask] = {"stock": _timed(lambda _, prompt: stock.next_token(prompt))}
    for name, mode in zip(names, GenerationMode, strict=True):
        found[name] = _ours(engine, mode, f"{salt}-{name}")
    found["floor"] = _floor(stock)
    for name in peers.names if peers is not None else ():
        found[f"{name} (pipe)"] = _peer(peers, name)
    yield found
    for name in names:
        engine.forget_salt(f"{salt}-{name}")


def _timed(run: Callable[[int, list[int]], object]) -> Ask:
    def ask(turn: int, prompt: list[int]) -> float:
        start = time.perf_counter()
        run(turn, prompt)
        return (time.perf_counter() - start) * 1e3

    return ask


def _ours(engine: KVBoost, mode: GenerationMode, salt: str) -> Ask:
    return _timed(lambda _, prompt: engine.generate(prompt, 1, mode, cache_salt=salt))


def _floor(stock: StockModel) -> Ask:
    """Stock transformers that keeps its cache from turn to turn, as a program for one user can."""
    cache, num_known = None, 0

    def run(turn: int, prompt: list[int]) -> None:
        nonlocal cache, num_known
        if turn == 1:
            cache = stock.prefill(prompt)
        else:
            stock.next_token(prompt[num_known:], cache)
        num_known = len(prompt)

    return _timed(run)


def _peer(peers: Contenders | None, name: str) -> Ask:
    def ask(turn: int, prompt: list[int]) -> float | None:
        assert peers is not None
        answer = peers.ask(name, prompt)
        return None if answer is None else answer.ttft_ms

    return ask
