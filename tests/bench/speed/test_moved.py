from __future__ import annotations

from kvboost import StockModel
from kvboost.bench.speed.moved import TURNS, measure_conversation, measure_moved
from tiny import make_engine, tiny_model


def model():
    return tiny_model("llama", max_position_embeddings=4096)


def test_moved_passages_are_timed_against_stock() -> None:
    with make_engine(model(), reuse_moved="always") as engine:
        timed = measure_moved(
            engine, StockModel(model()), num_passages=3, passage_tokens=100, rounds=2
        )
        assert timed.moved_tokens >= 200 and timed.num_tokens > 300
        assert set(timed.over_stock) == {"auto", "cacheblend", "none", "no_hit"}
        assert all(ratio > 0 for ratio in timed.over_stock.values())


def test_a_conversation_is_repaired_once() -> None:
    with make_engine(model(), reuse_moved="always") as engine:
        turns = measure_conversation(engine, 1, num_passages=2, passage_tokens=80)
    assert len(turns) == TURNS
    assert turns[0].repaired_tokens > 0
    assert all(turn.repaired_tokens == 0 for turn in turns[1:])
