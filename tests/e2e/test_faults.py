"""Damaged files and clocks that jump: the answers stay those of a plain prefill, a counter moves,
and nothing is raised. ``tests/benchmarks/test_faults.py`` has what the fault run tries."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path

import pytest
import torch

from benchmarks.faults.workers import prompt
from kvboost import GenerationMode, KVBoost
from kvboost.cache.tiers import disk
from support.tiny import make_engine, tiny_model

PREFIX = GenerationMode.PREFIX_CACHE


@pytest.fixture(autouse=True)
def one_core() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def answers() -> dict[int, list[int]]:
    with make_engine(tiny_model("llama")) as engine:
        return {
            number: engine.generate(prompt(number), 4, GenerationMode.BASELINE).token_ids
            for number in range(12)
        }


def check_answers(engine: KVBoost, answers: dict[int, list[int]]) -> int:
    """How many prompt tokens came from the cache; every answer must be the plain one."""
    reused = 0
    for number, expected in answers.items():
        result = engine.generate(prompt(number), 4, PREFIX)
        assert result.token_ids == expected
        reused += result.cached_tokens
    return reused


def disk_faults(engine: KVBoost) -> dict[str, int]:
    return engine.cache_stats()["tiers"]["disk"]["faults"]


def chunk_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("??/*.safetensors"))


@pytest.mark.parametrize("damage", ["flip", "truncate", "vanish", "foreign"])
def test_damaged_files(damage, open_engine, answers, tmp_path, monkeypatch) -> None:
    """Thirty flipped bits, and ten files of every other damage."""
    # A new listing of the folder would notice a missing file before a request asks for it.
    monkeypatch.setattr(disk, "REFRESH_SECONDS", 1e9)
    folder, pristine = tmp_path / "kv", tmp_path / "pristine"
    first = open_engine()
    check_answers(first, answers)
    first.close()
    shutil.copytree(folder, pristine)
    rng = random.Random(1)
    faults = reused = 0
    for _ in range(3 if damage == "flip" else 1):
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
        engine = open_engine()
        engine.plan([1])  # the folder is scanned
        for path in rng.sample(chunk_files(folder), 10):
            data = bytearray(path.read_bytes())
            if damage == "flip":
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                path.write_bytes(data)
            elif damage == "truncate":
                path.write_bytes(data[: rng.randrange(len(data))])
            elif damage == "foreign":
                path.write_bytes(rng.randbytes(len(data)))
            else:
                path.unlink()
        reused += check_answers(engine, answers)
        faults += sum(disk_faults(engine).values())
        known = {"corrupt", "vanished"}
        # A flipped bit can lie in the format's name, which then is that of another version.
        assert set(disk_faults(engine)) <= known | ({"version"} if damage == "flip" else set())
        assert engine.check_integrity() == []
        engine.close()
    assert faults >= (3 if damage == "flip" else 1) and reused > 0


def test_a_clock_that_jumps(open_engine, answers, tmp_path, monkeypatch) -> None:
    first = open_engine()
    check_answers(first, answers)
    first.close()
    rng = random.Random(2)
    for path in chunk_files(tmp_path / "kv"):
        day = rng.choice([0, 10**9, 2 * 10**9, 2**32])
        os.utime(path, (day, day))
    jumps = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 * (-1) ** next(jumps))
    engine = open_engine(disk_cache_bytes=500_000, max_cache_bytes=300_000)
    for _ in range(2):
        assert check_answers(engine, answers) > 0
        engine.flush()
    stats = engine.cache_stats()
    assert stats["tiers"]["disk"]["hits"] > 0 and stats["evicted"] > 0
    assert stats["tiers"]["disk"]["faults"] == {}
    assert engine.check_integrity() == []
