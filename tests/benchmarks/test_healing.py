from __future__ import annotations

from benchmarks import healing
from support.tiny import make_engine, tiny_model


def test_every_way_is_timed_and_verified_answers_are_compared(capsys) -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    with make_engine(model, reuse_moved="always") as engine:
        found = healing.measure(engine, 5, rounds=2, passages=3)
        assert engine.cache_stats()["healing"]["healed"] == 3  # with the round that warms up
    assert found["moved_tokens"] > 400
    assert found["same_as_full_prefill"] == "2 of 2"
    printed = capsys.readouterr().out
    for way in healing.WAYS:
        assert way in printed
        assert found[way]["total_ms"] >= found[way]["first_text_ms"] > 0
        assert found[way]["processor_ms"] > 0
    ratio = found["verified_to_full_prefill_processor"]
    assert ratio > 0 and f"{ratio:.2f} of the processor's time" in printed
