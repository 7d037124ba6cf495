from __future__ import annotations

import pytest

from kvboost.bench.speed.batch import measure_decode, measure_document, measure_shared
from kvboost.model.load import LoadedModel, wrap
from tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("llama", max_position_embeddings=2048), byte_tokenizer())


def test_answers_are_timed_both_ways(model: LoadedModel) -> None:
    measured = measure_decode(model, requests=3, new_tokens=4, rounds=1)
    assert measured.slow.median_ms > 0 and measured.fast.median_ms > 0
    assert measured.factor == measured.slow.median_ms / measured.fast.median_ms


def test_shared_rows_are_counted_once(model: LoadedModel) -> None:
    measured = measure_shared(model, tokens=512, requests=4, rounds=1)
    row = model.forward.shape.row_bytes
    assert measured.own_bytes == 4 * 768 * row
    assert measured.shared_bytes == (512 + 4 * 256) * row


def test_a_document_is_read_by_one_request_or_by_each(model: LoadedModel) -> None:
    measured = measure_document(model, tokens=600, requests=3, rounds=1)
    assert measured.factor > 0
