from __future__ import annotations

from rich.console import Console

from benchmarks.shuffles import Settings, measure, stream_table
from kvboost.model.loading.load import wrap
from tiny import byte_tokenizer, tiny_model


def test_a_stream_of_new_orders_keeps_its_reuse_in_a_bounded_cache() -> None:
    loaded = wrap(tiny_model("llama", max_position_embeddings=4096), byte_tokenizer())
    settings = Settings(requests=8, documents=3, drawn=2, words=60, every=4, answer_tokens=2)
    told: list[None] = []
    served = list(measure(loaded, settings, lambda: told.append(None)))
    assert len(told) == 8 and served[0].reused == 0
    later = served[4:]  # all documents are known by then
    assert all(one.reused > 0.5 for one in later) and any(one.moved for one in later)
    assert all(one.seam_rows < 16 for one in later)
    assert [one.number for one in served if one.kl is not None] == [3, 7]
    most = max(one.cached_bytes for one in served)
    assert 0 < most <= 3 * sum(60 * 8 for _ in range(3)) * loaded.forward.shape.row_bytes
    console = Console(width=80, record=True)
    console.print(stream_table(served))
    assert "7–8" in console.export_text()
