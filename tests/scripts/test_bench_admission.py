"""The benchmark of storing rows runs, and its chunks are stored."""

from __future__ import annotations

import json

from kvboost.cache.store import ChunkStore
from load_script import load_script


def test_every_request_stores_its_chunks(monkeypatch, capsys) -> None:
    script = load_script("bench_admission")
    new: list[int] = []
    admit = ChunkStore.admit

    def counted(*args, **options) -> int:
        new.append(admit(*args, **options))
        return new[-1]

    monkeypatch.setattr(script, "UNTIMED", 1)
    monkeypatch.setattr(ChunkStore, "admit", counted)
    script.main(2)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prompt_ms"] > 0 and report["answer_ms"] > 0
    known = 1  # all prompts begin with the same chunk
    assert new == [script.CHUNKS, 1, *[script.CHUNKS - known, 1] * 2]
