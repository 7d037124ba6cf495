"""Other engines on the same documents: new, known, and known at other places.

cold       intro  A B C D E  question    nothing is known
warm       intro  A B C D E  question    all but the question is known: a prefix
moved      other  A B C D E  question    the documents are known, the text before them is new
reordered  intro  E C A D B  question    the documents are known, their order is new
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.bench.kit.timing import Sample
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.worker import Answer
from kvboost.bench.texts.prompts import MAX_QUESTIONS, Encode, Unread, question

LENGTHS = (256, 512, 1024, 2048, 4096)
DOCUMENTS = 5
INTRO_TOKENS = 16
SLOW_MS = 10_000.0
"""An engine that takes longer to read a prompt is not given longer ones."""


@dataclass(frozen=True)
class PeerTime:
    """One engine at one length."""

    name: str
    num_tokens: int
    cold: Sample
    warm: Sample
    moved: Sample
    reordered: Sample
    reused: Mapping[str, float | None]
    """Of the known tokens, the share that was not computed, by place; None where the engine does
    not tell."""


def make_round(
    encode: Encode, unread: Unread, number: int, num_tokens: int, num_new: int
) -> dict[str, list[int]]:
    """The prompts of round ``number`` by place, in the order they are asked. Their text is in no
    other round."""
    documents = unread.take(num_tokens - num_new - INTRO_TOKENS)
    intro, other = unread.take(INTRO_TOKENS), unread.take(INTRO_TOKENS)
    size = -(-len(documents) // DOCUMENTS)
    parts = [documents[at : at + size] for at in range(0, len(documents), size)]
    order = parts[::2][::-1] + parts[1::2][::-1]
    beginnings = {
        "cold": intro + documents,
        "warm": intro + documents,
        "moved": other + documents,
        "reordered": intro + [token for part in order for token in part],
    }
    first = number * len(beginnings)
    return {
        place: ids + question(encode, (first + at) % MAX_QUESTIONS, num_new)
        for at, (place, ids) in enumerate(beginnings.items())
    }


def measure_peers(
    peers: Contenders,
    encode: Encode,
    lengths: Sequence[int] = LENGTHS,
    num_new: int = 32,
    rounds: int = 3,
    on_round: Callable[[], None] = lambda: None,
) -> list[PeerTime]:
    """Every engine at every place, in turns. The first round of a length does not count. An engine
    that fails on the way is left out."""
    unread = Unread(encode)
    found: list[PeerTime] = []
    slow: set[str] = set()
    for length in sorted(lengths):
        names = [name for name in peers.names if name not in slow]
        answers: dict[tuple[str, str], list[Answer]] = defaultdict(list)
        for number in range(rounds + 1):
            prompts = make_round(encode, unread, number, length, num_new)
            for at, (place, ids) in enumerate(prompts.items()):
                for name in names if (number + at) % 2 else reversed(names):
                    answer = peers.ask(name, ids)
                    if number and answer is not None:
                        answers[name, place].append(answer)
            on_round()
        for name in names:
            if name in peers.names:
                known = {
                    "warm": length - num_new,
                    "moved": length - num_new - INTRO_TOKENS,
                    "reordered": length - num_new,
                }
                times = {
                    place: Sample.of([answer.ttft_ms for answer in answers[name, place]])
                    for place in ("cold", *known)
                }
                reused = {place: _share(answers[name, place], known[place]) for place in known}
                found.append(PeerTime(name, length, **times, reused=reused))
                if found[-1].cold.median_ms > SLOW_MS:
                    slow.add(name)
    return found


def _share(answers: Sequence[Answer], known_tokens: int) -> float | None:
    told = [answer.cached_tokens for answer in answers if answer.cached_tokens is not None]
    return min(1.0, statistics.median(told) / known_tokens) if told else None
