from __future__ import annotations

from kvboost.bench.speed.arrange import measure_arranged
from tiny import make_engine, tiny_model


def test_arranging_makes_more_of_a_stream_exact() -> None:
    with make_engine(tiny_model("llama", max_position_embeddings=4096)) as engine:
        found = measure_arranged(engine, requests=12, num_documents=6, drawn=3)
    assert found.arranged > found.as_given > 0
