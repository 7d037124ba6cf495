"""What content routing gains, with the real router and the real store but without a model.

    python -m benchmarks routing [documents] [held] [requests] [seeds]

The traffic of the benchmark ``cluster``: 24 documents, room for 6 in each of two servers and 144
requests, with 6 seeds, unless said otherwise. A server is a store whose chunks hold no KV to speak
of; a request takes as long as it has tokens to compute. Prints, for each seed, the share of tokens
not computed in turn, by content, and if each document has its server from the start; JSON comes
last. Thousands of requests take a minute, so routers can be compared on more than a few.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Callable
from itertools import count
from statistics import mean
from typing import Any

import torch

from benchmarks.cluster import CLIENTS, PROMPT_TOKENS, Traffic
from kvboost.bench.peers.setting import Vocabulary, prepare
from kvboost.cache.chunk import Origin
from kvboost.cache.lookup.anchors import anchor_window
from kvboost.cache.quantize import plain
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import DEFAULT_MODEL, EngineConfig
from kvboost.deploy.content import Sketch, sketch
from kvboost.deploy.router import Choice, Router, RouterSettings
from kvboost.reuse.plan import LIVE_TOKENS, make_plan
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import TokenIds, as_token_ids, root_key

CHUNK = EngineConfig.chunk_size
REPAIRED = EngineConfig.recompute_ratio
ROW_BYTES = 2 * 4
ROOT = root_key("model", "")
SERVERS = ("a", "b")
OVERHEAD = 20
"""What a request takes beside its tokens, in tokens."""

Route = Callable[[Router, Sketch, str], Choice]


class Server:
    def __init__(self, rows: int) -> None:
        self._store = ChunkStore(
            Tiers(RamTier(rows * ROW_BYTES)),
            cut=lambda ids, _: fixed(len(ids), CHUNK),
            origin=Origin("model"),
            window=anchor_window(CHUNK),
        )

    def read(self, ids: TokenIds) -> tuple[int, int, int]:
        """Rows in place, moved rows, and where the first moved one is."""
        before = max(0, len(ids) - LIVE_TOKENS)
        with self._store.lookup(ROOT, ids, moved_before=before, repair="query") as known:
            plan = make_plan(len(ids), known, 0)
            self._store.touch(known.in_place, *(run.hits for run in plan.moved))
        in_place = plan.in_place[-1].end if plan.in_place else 0
        return in_place, plan.num_moved, plan.moved[0].start if plan.moved else len(ids)

    def keep(self, ids: TokenIds, exact_rows: int) -> None:
        self._store.admit(
            ROOT,
            ids,
            lambda parts: [plain(torch.empty(2, 1, 1, p.end - p.start, 1)) for p in parts],
            exact_rows=exact_rows,
            repair="query",
        )


def best(router: Router, asked: Sketch, prompt: str) -> Choice:
    return router.rank(asked, SERVERS)[0]


def fixed_servers(documents: list[str]) -> Route:
    """Every other document of similar popularity has the same server."""

    def route(router: Router, asked: Sketch, prompt: str) -> Choice:
        number = next(number for number, text in enumerate(documents) if text in prompt)
        name = SERVERS[number % 4 in (1, 2)]
        return next(one for one in router.rank(asked, SERVERS) if one.upstream == name)

    return route


def share(
    policy: str, route: Route, traffic: Traffic, vocabulary: Vocabulary, held: int, requests: int
) -> float:
    """The tokens that are not computed, as a share of all."""
    rows = held * PROMPT_TOKENS
    servers = {name: Server(rows) for name in SERVERS}
    router = Router(SERVERS, RouterSettings(policy, rows))
    prompts, numbers, now = traffic.prompts(), count(), 0.0
    tokens = saved = sent = 0
    running: list[Any] = []
    while sent < requests or running:
        while sent < requests and len(running) < CLIENTS:
            prompt = next(prompts)
            sent += 1
            asked = sketch(json.dumps({"prompt": prompt}).encode())
            choice = route(router, asked, prompt)
            flight = router.send(choice, asked)
            ids = as_token_ids(vocabulary.encode(prompt))
            in_place, moved, exact_rows = servers[choice.upstream].read(ids)
            kept = in_place + moved - round(REPAIRED * moved)
            tokens, saved = tokens + len(ids), saved + kept
            end = now + len(ids) - kept + OVERHEAD
            heapq.heappush(
                running, (end, next(numbers), choice.upstream, ids, exact_rows, in_place, flight)
            )
        now, _, name, ids, exact_rows, in_place, flight = heapq.heappop(running)
        servers[name].keep(ids, exact_rows)
        flight.answering()
        flight.found(in_place)
        flight.end(was_read=True)
    return saved / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, usual in (("documents", 24), ("held", 6), ("requests", 144), ("seeds", 6)):
        parser.add_argument(name, type=int, nargs="?", default=usual, help=f"default: {usual}")
    measure(**vars(parser.parse_args()))


def measure(documents: int, held: int, requests: int, seeds: int) -> None:
    _, vocabulary = prepare(DEFAULT_MODEL)
    gains: dict[str, list[float]] = {"content": [], "fixed": []}
    for seed in range(seeds):
        traffic = Traffic.make(vocabulary, documents, seed)
        given = (traffic, vocabulary, held, requests)
        turns = share("round-robin", best, *given)
        content = share("content", best, *given)
        assigned = share("content", fixed_servers(traffic.documents), *given)
        gains["content"].append(content / turns)
        gains["fixed"].append(assigned / turns)
        print(
            f"seed {seed}: in turn {turns:.0%}, by content {content:.0%} "
            f"({content / turns:.2f} ×), fixed {assigned:.0%} ({assigned / turns:.2f} ×)"
        )
    for name, found in gains.items():
        print(f"{name}: {mean(found):.2f} × on average, {min(found):.2f} to {max(found):.2f}")
    print(json.dumps(gains))
