from __future__ import annotations

import pytest
import torch
from rich.console import Console

from kvboost.bench.memory import (
    Memory,
    expected_bytes_per_token,
    forget_peak,
    packed_mb,
    peak_mb,
    weights_mb,
)
from kvboost.bench.resident import resident_mb
from kvboost.bench.study_plots import memory_figure
from kvboost.bench.study_report import memory_tables
from kvboost.model.load import wrap
from tiny import byte_tokenizer, make_engine, tiny_model


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_the_expected_bytes_are_those_a_store_holds(bits: int) -> None:
    with make_engine(
        tiny_model("llama", max_position_embeddings=512), chunk_size=64, kv_cache_bits=bits
    ) as engine:
        engine.warm(list(range(1, 193)))
        stored = [one for one in engine.chunks(100) if one["position"]]
        assert [one["tokens"] for one in stored] == [64, 64]
        expected = expected_bytes_per_token(engine._model.forward.shape, bits)
        assert [one["bytes"] / one["tokens"] for one in stored] == [expected, expected]


def test_weights_are_counted_once() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    loaded = wrap(model, byte_tokenizer())
    tied = model.get_input_embeddings().weight.nbytes
    assert weights_mb(loaded) * 1e6 == pytest.approx(
        sum(one.nbytes for name, one in model.state_dict().items() if name != "lm_head.weight")
    )
    assert weights_mb(loaded) * 1e6 > tied
    assert packed_mb(loaded) == 0  # in float32 there is one copy only


def test_the_peak_keeps_freed_memory_until_the_kernel_resets_it() -> None:
    forget_peak()
    before = peak_mb()
    taken = torch.ones(64 << 20, dtype=torch.uint8)
    del taken
    high = peak_mb()
    if not forget_peak():
        assert peak_mb() >= high  # it says so, and the peak is indeed the old one
        pytest.skip("this kernel ignores /proc/self/clear_refs; `bench memory` says so too")
    assert high > before + 50
    assert peak_mb() < high - 30 and peak_mb() >= resident_mb() * 0.95


def row(bits: int, tokens: int) -> Memory:
    return Memory(bits, tokens, 300.0, 200.0, 100.0, 50.0, 25.0, 900.0, 750.0, 99.0, 100.0, {})


def test_the_prediction_is_the_sum_of_its_parts(capsys) -> None:
    rows = [row(16, 512), row(4, 512), row(4, 1024)]
    assert (rows[0].predicted, rows[0].difference) == (675.0, 75.0)
    assert rows[0].as_json()["predicted"] == 675.0 and "machine" not in rows[0].as_json()
    first, second = memory_tables(rows)
    assert (first.row_count, second.row_count) == (2, 3)
    Console(width=80).print(second)
    assert "+75 +11%" in capsys.readouterr().out
    left, right = memory_figure(rows, title="x").axes
    assert len(left.patches) == 4
    assert max(bar.get_y() + bar.get_height() for bar in right.patches) == 675.0
