"""Process A reads a document and ends; process B's first request hits from disk."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from benchmarks.entries import BENCHMARKS
from benchmarks.restart import Settings
from support.tiny import save_tiny


def test_the_first_request_of_the_next_process_hits_from_disk(tmp_path: Path) -> None:
    save_tiny(tmp_path, max_position_embeddings=1024)
    settings = Settings(model=str(tmp_path), tokens=512, dtype="float32")
    report = BENCHMARKS["restart"].perform(settings, Console(quiet=True))
    assert report["tiers"]["disk"] == 512 and report["tiers"]["computed"] < 100
    assert report["same_answer"] is True
    assert json.dumps(report)
