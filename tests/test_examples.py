"""Every example runs, and its answers match."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny import byte_tokenizer, tiny_model

RUNNER = Path(__file__).parents[1] / "examples" / "run.py"


def test_every_pattern_runs_and_its_answers_match(tmp_path) -> None:
    tiny_model("llama", max_position_embeddings=16384, num_hidden_layers=2).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, RUNNER, "all", "--model", tmp_path, "--max-new-tokens", "4"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    patterns = ("chatbot", "rag", "fewshot", "multiturn", "code")
    assert all(f"\n{name}: " in done.stdout for name in patterns)
    verdict = "5 of 5 answers, compared token by token, are the same"
    assert done.stdout.count(verdict) == len(patterns)
