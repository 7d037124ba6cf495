from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvboost.bench.tiers import (
    _read_text,
    measure_packing,
    measure_promotion,
    measure_scan,
    packing_table,
    promotion_table,
)
from kvboost.model.load import LoadedModel, wrap
from kvboost.reuse.rope import Rotation
from tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return wrap(tiny_model("llama", max_position_embeddings=1024), byte_tokenizer())


def test_what_was_read_is_brought_up_from_both_tiers(model, tmp_path: Path) -> None:
    _read_text(model, tmp_path, 512)
    rows = torch.zeros_like(model.forward.shape.allocate(512))
    ram, disk = measure_promotion(tmp_path, rows, rounds=2)
    assert (ram.tier, disk.tier) == ("ram", "disk") and ram.nbytes == disk.nbytes == rows.nbytes
    assert (rows.abs().sum(dim=(0, 1, 2, 4)) > 0).all()  # every row was put in place
    assert ram.ratio > 0 and disk.ratio > 0
    assert promotion_table([ram, disk]).row_count == 2


def test_packing_is_measured_on_real_kv(model, tmp_path: Path) -> None:
    _read_text(model, tmp_path, 512)
    assert model.frequencies is not None
    eight, four = measure_packing(tmp_path, Rotation(model.frequencies), rounds=1)
    assert 1 < eight.smaller < four.smaller
    assert 0 < eight.key_error < four.key_error and 0 < eight.value_error < four.value_error
    assert packing_table([eight, four]).row_count == 2


def test_a_folder_is_scanned(model) -> None:
    assert measure_scan(50) > 0
