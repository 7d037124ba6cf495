"""Order as a free choice: what arranging documents saves on a stream of requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvboost import GenerationMode, KVBoost
from kvboost.bench.workloads import docstrings

HEADER = "Answer from the passages below.\n\n"


@dataclass(frozen=True)
class Arranged:
    """Shares of prompt tokens that were exact hits, over all requests."""

    requests: int
    documents: int
    drawn: int
    as_given: float
    arranged: float


def measure_arranged(
    engine: KVBoost,
    *,
    requests: int = 150,
    num_documents: int = 50,
    drawn: int = 5,
    seed: int = 0,
    on_request: Callable[[], None] = lambda: None,
) -> Arranged:
    """Requests that draw some of the documents by a Zipf law, in a random order: sent as they are
    and, under another salt, arranged."""
    texts = [
        f"[{number}] {where}: {text[:300]}\n\n"
        for number, (where, text) in enumerate(docstrings()[:num_documents])
    ]
    weights = [1 / (rank + 1) for rank in range(len(texts))]
    draw = random.Random(seed)
    exact = dict.fromkeys(("as given", "arranged"), 0)
    total = 0
    for number in range(requests):
        chosen = _draw(draw, weights, drawn)
        documents = [texts[one] for one in chosen]
        ask = f"Question {number}: which of these would you use first?"
        arranged = engine.arrange(HEADER, documents, ask, cache_salt="arranged")
        prompts = {
            "as given": engine.arrange(HEADER, documents, ask, cache_salt="nothing").prompt,
            "arranged": arranged.prompt,
        }
        for name, prompt in prompts.items():
            result = engine.generate(prompt, 1, GenerationMode.PREFIX_CACHE, cache_salt=name)
            exact[name] += result.exact_tokens
        total += len(arranged.prompt)
        on_request()
    for name in exact:
        engine.forget_salt(name)
    shares = {name: count / total for name, count in exact.items()}
    return Arranged(requests, len(texts), drawn, shares["as given"], shares["arranged"])


def _draw(draw: random.Random, weights: list[float], count: int) -> list[int]:
    """``count`` different places, likelier where the weight is larger, in a random order."""
    keys = [draw.random() ** (1 / weight) for weight in weights]
    chosen = sorted(range(len(weights)), key=keys.__getitem__, reverse=True)[:count]
    draw.shuffle(chosen)
    return chosen
