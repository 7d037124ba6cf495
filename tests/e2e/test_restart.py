"""Process A reads a document and ends; process B's first request hits from disk."""

from __future__ import annotations

import json

from rich.console import Console

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.bench.cache.restart import Settings


def test_the_first_request_of_the_next_process_hits_from_disk() -> None:
    settings = Settings(tokens=256, dtype="float32")
    report = BENCHMARKS["restart"].perform(settings, Console(quiet=True))
    assert report["tiers"]["disk"] == 256 and report["tiers"]["computed"] < 40
    assert report["same_answer"] is True
    assert json.dumps(report)
