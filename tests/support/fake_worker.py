"""A fake engine over a pipe; its options say how it behaves."""

from __future__ import annotations

import os
import sys
import time
from itertools import takewhile
from operator import eq
from pathlib import Path


def fake_engine(name: str = "fake", **options: object):
    """Its description for a worker."""
    from kvboost.bench.peers.engines import Engine as Described

    return Described(name, Path(__file__), options=options)


class Engine:
    """``first_s`` and ``rest_s`` are how long it sleeps; ``after`` is how many prompts it answers
    before it does as ``then`` says: die, hang, raise or babble."""

    def __init__(self, given: dict) -> None:
        if given.get("load") == "die":
            print("no such weights", file=sys.stderr)
            os._exit(3)
        if given.get("load") == "hang":
            print("compiling", file=sys.stderr, flush=True)
            time.sleep(60)
        print("engines print to standard output, and it is no answer")
        self.version, self.weights = "fake 1.0", given["dtype"]
        self._given = given
        self._known: list[list[int]] = []

    def generate(self, request: dict, first) -> dict:
        if len(self._known) >= self._given.get("after", 1 << 30):
            print("last words", file=sys.stderr, flush=True)
            match self._given["then"]:
                case "die":
                    os._exit(5)
                case "hang":
                    time.sleep(60)
                case "raise":
                    raise ValueError("prompt refused")
        time.sleep(self._given.get("first_s", 0.0))
        if self._given.get("streams", True):
            first()
        time.sleep(self._given.get("rest_s", 0.0))
        ids = request["ids"]
        shared = (sum(takewhile(bool, map(eq, ids, known))) for known in self._known)
        cached = max(shared, default=0)
        self._known.append(ids)
        tells = self._given.get("tells", True)
        text = request["text"].split()
        return {
            "prompt_tokens": len(text) if self._given.get("counts_words") else len(ids),
            "cached_tokens": cached if tells else None,
        }
