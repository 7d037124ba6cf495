from __future__ import annotations

from pathlib import Path

from rich.console import Console

from benchmarks import moved
from benchmarks.entries import BENCHMARKS
from support.tiny import byte_tokenizer, make_engine, tiny_model


def model():
    return tiny_model("llama", max_position_embeddings=4096)


def test_a_conversation_is_repaired_once() -> None:
    with make_engine(model(), reuse_moved="always") as engine:
        turns = moved.measure_conversation(engine, 1, num_passages=2, passage_tokens=80)
    assert len(turns) == moved.TURNS
    assert turns[0].repaired_tokens > 0
    assert all(turn.repaired_tokens == 0 for turn in turns[1:])


def test_the_record_has_every_part(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    settings = moved.Settings(model=folder, rounds=1, conversations=1)
    report = BENCHMARKS["moved"].perform(settings, Console(quiet=True))
    assert {"stock", "auto", "cacheblend", "none", "no_hit", "over_stock"} <= set(report["moved"])
    assert len(report["turns"]) == 5 and report["machine"]["cores"] >= 1 and report["commit"]
