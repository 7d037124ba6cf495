from __future__ import annotations

from kvboost.bench.bits import EXACT, BitsRow, bits_table, measure_bits, summarize
from kvboost.bench.quality import Setting
from kvboost.bench.questions import make_questions
from tiny import make_engine, tiny_model


def test_fewer_bits_deviate_more_and_sixteen_not_at_all() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    engines = {
        bits: make_engine(model, chunk_size=64, kv_cache_bits=bits, reuse_moved="always")
        for bits in (16, 8, 4)
    }
    rows = list(measure_bits(engines, make_questions(2), ["header"], Setting(3, 128, 6)))
    kl = {(one.bits, one.served): one.mean_kl for one in summarize(rows, {16: 3, 8: 2, 4: 1})}
    assert kl[16, EXACT] < 1e-6 < kl[8, EXACT] < kl[4, EXACT]
    assert kl[16, "header"] > 1e-4  # moved text is an approximation to begin with
    for engine in engines.values():
        assert engine.cache_stats()["hot_chunks"] == 0  # nothing is left of it
        engine.close()


def test_rows_are_counted_by_tokens_and_by_questions() -> None:
    rows = [BitsRow("a", 8, EXACT, 10, 10, 0.0), BitsRow("b", 8, EXACT, 30, 27, 0.2)]
    (one,) = summarize(rows, {8: 12.0})
    assert (one.questions, one.top1, one.mean_kl, one.same_text) == (2, 37 / 40, 0.1, 0.5)
    assert bits_table([one]).row_count == 1
