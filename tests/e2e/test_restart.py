"""Process A reads a document and ends; process B's first request hits from disk."""

from __future__ import annotations

import json

from rich.console import Console

from kvboost.bench.restart import run_restart


def test_the_first_request_of_the_next_process_hits_from_disk() -> None:
    report = run_restart("smollm2-135m", 512, 16, Console(quiet=True), dtype="float32")
    assert report["tiers"]["disk"] == 512 and report["tiers"]["computed"] < 40
    assert report["same_answer"] is True
    assert json.dumps(report)
