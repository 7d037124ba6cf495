"""Order as a free choice: what arranging documents saves on a stream of requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import ClassVar

from kvboost import GenerationMode, KVBoost
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, option
from kvboost.bench.texts.prompts import docstrings
from kvboost.progress import Progress

HEADER = "Answer from the passages below.\n\n"


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"requests": 20}

    requests: int = option(150, "How many requests are sent.", least=1)

    def tokens_read(self) -> float:
        return 650 * self.requests


@dataclass(frozen=True)
class Arranged:
    """Shares of prompt tokens that were exact hits, over all requests."""

    requests: int
    documents: int
    drawn: int
    as_given: float
    arranged: float


def run(settings: Settings, bench: Bench) -> Report:
    with (
        bench.load_engine() as engine,
        Progress("requests that draw 5 of 50 documents by a Zipf law") as progress,
        progress.step("requests", settings.requests) as step,
    ):
        found = measure_arranged(engine, requests=settings.requests, on_request=step.advance)
    told = (
        f"exact hits, share of prompt tokens over {found.requests} requests: "
        f"{found.as_given:.1%} as given, {found.arranged:.1%} arranged"
    )
    return Report(asdict(found), [told])


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
        documents = [texts[place] for place in _draw(draw, weights, drawn)]
        ask = f"Question {number}: which of these would you use first?"
        arranged = engine.arrange(HEADER, documents, ask, cache_salt="arranged")
        given = engine.arrange(HEADER, documents, ask, cache_salt="nothing")
        for name, prompt in (("as given", given.prompt), ("arranged", arranged.prompt)):
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
