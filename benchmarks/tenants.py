"""How well can one tenant tell, by first-token times, that another has sent a text?

    python -m benchmarks tenants --texts 40

Two keys use one server. For every text a coin decides whether Ann sends it, or another text as
long; then Bob sends it and takes the time to his first token, over a connection that he keeps. The
figure is the chance that a text which Ann has sent gives Bob a shorter time than one that she has
not: 0.5 tells him nothing, 1 everything. It is measured with a cache for each key, which is the
default, and with --shared-cache.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from collections.abc import Sequence

from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import KVBoostServer
from kvboost.bench.peers.setting import Setting, prepare
from kvboost.bench.serve.clients import Answer, Target, ask
from kvboost.bench.serve.connection import Connection
from kvboost.bench.texts.questions import make_questions
from kvboost.config import DEFAULT_MODEL

KEYS = {"ann": "ann-0123456789", "bob": "bob-0123456789"}
WARMUPS = 4


class KeyedServer(KVBoostServer):
    """Ours, with two keys."""

    def environment(self, setting: Setting) -> dict[str, str]:
        keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
        return super().environment(setting) | {"KVBOOST_API_KEYS": keys}


async def times(there: Running, texts: Sequence[str], seed: int) -> tuple[list[float], list[float]]:
    """Bob's milliseconds to the first token, of texts that Ann has sent and of others."""
    target, rng = Target(there.url, there.model, 1), random.Random(seed)
    told: tuple[list[float], list[float]] = ([], [])
    ann, bob = (Connection(there.url, {"authorization": f"Bearer {KEYS[one]}"}) for one in KEYS)
    for number, (text, other) in enumerate(zip(texts[::2], texts[1::2], strict=True)):
        is_sent = rng.random() < 0.5
        for tenant, said in ((ann, text if is_sent else other), (bob, text)):
            answer = Answer(0.0)
            message = {"role": "user", "content": f"{said}\n\nWhat is this about?"}
            await ask(tenant, target, [message], answer)
            if answer.error is not None or answer.ttft_s is None:
                raise SystemExit(f"a request failed: {answer.error}")
            seconds = answer.ttft_s
        if number >= WARMUPS:
            told[0 if is_sent else 1].append(1e3 * seconds)
    ann.close()
    bob.close()
    return told


def chance(sent: Sequence[float], others: Sequence[float]) -> float:
    """That a time of ``sent`` is shorter than one of ``others``."""
    pairs = [(one < other) + 0.5 * (one == other) for one in sent for other in others]
    return sum(pairs) / len(pairs)


def interval(sent: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the chance over resampled times."""
    rng = random.Random(0)
    drawn = sorted(
        chance(rng.choices(sent, k=len(sent)), rng.choices(others, k=len(others)))
        for _ in range(1000)
    )
    return drawn[25], drawn[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--texts", type=int, default=40, help="texts of each run")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    number = 2 * (asked.texts + WARMUPS)
    questions = make_questions(number, seed=asked.seed, num_passages=2, words_per_passage=100)
    texts = ["\n\n".join(question.passages) for question in questions]
    setting, _ = prepare(asked.model, 2)
    record = {}
    for name, options in (("a cache for each key", ()), ("a shared cache", ("--shared-cache",))):
        with running(
            KeyedServer("kvboost", "chunk_kv_reuse", *options), setting, key=KEYS["ann"]
        ) as there:
            sent, others = asyncio.run(times(there, texts, asked.seed))
        low, high = interval(sent, others)
        middle = [statistics.median(one) for one in (sent, others)]
        print(
            f"{name}: {chance(sent, others):.2f} (95 %: {low:.2f} to {high:.2f}); first token "
            f"{middle[0]:.0f} ms of {len(sent)} texts that the other has sent, {middle[1]:.0f} ms "
            f"of {len(others)} others",
            flush=True,
        )
        record[name] = {
            "chance": chance(sent, others),
            "interval": [low, high],
            "median_ms": middle,
        }
    print(json.dumps(record))
