"""A packed model is made layer by layer, parked on the host, and streamed from there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from kvboost.errors import ModelError
from kvboost.model import triton
from kvboost.model.loading.load import read
from kvboost.model.quantized import products
from kvboost.model.quantized.cuda import CodesProduct, TensorCoreProduct
from kvboost.model.quantized.layers import BlockProduct, QuantizedEmbedding
from kvboost.model.quantized.weight import QuantizedWeight
from kvboost.model.streaming.embedding import HostEmbedding
from kvboost.model.streaming.parking import Parking
from kvboost.model.streaming.place import decoder_layers, place
from kvboost.model.streaming.plan import DeviceBudget
from support import tiny
from support.late_slots import LateSlots
from support.tiny import tiny_model
from support.tiny_gguf import install_tiny

DEVICE = torch.device("cpu", 0)
"""Another name than the host's."""


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(2, 40)[None]).logits
    return logits


@pytest.mark.parametrize(("most_bytes", "spills"), [(1 << 30, False), (30_000, True)])
def test_a_parked_model_streams_its_codes(
    most_bytes: int, spills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parked in memory, or as far as that goes, and then in a file."""
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr(products, "native_dtype", lambda *_: None)
    monkeypatch.setattr("kvboost.model.streaming.plan.OTHER_BYTES", 0)
    install_tiny(tiny_model("llama", num_hidden_layers=6).cpu(), tmp_path)
    options = {"strict": True, "dtype": "float32", "weight_form": "packed"}
    expected = logits_of(read("tiny", device="cpu", **options)[0])
    parking = Parking(most_bytes)
    model, _ = read("tiny", device=DEVICE, parked=parking, **options)
    assert (parking.spilled_bytes > 0) == spills
    assert not list((tmp_path / "layers").glob("*")), "the file has no name"
    assert isinstance(model.get_input_embeddings(), QuantizedEmbedding)
    made: list[LateSlots] = []

    def make_slots(number: int, num_bytes: int, device: torch.device) -> LateSlots:
        made.append(LateSlots(number, num_bytes, device))
        return made[0]

    budget = DeviceBudget(600_000, host_bytes=most_bytes)
    placement = place(model, DEVICE, budget, make_slots, spilled_bytes=parking.spilled_bytes)
    assert placement.streamed is not None and 0 < len(placement.streamed) < 6
    assert (len(placement.plan.on_disk) > 0) == spills
    assert isinstance(model.get_input_embeddings(), HostEmbedding)
    streamed = decoder_layers(model)[placement.plan.streamed[0]]
    held_products = [each.product for each in streamed.mlp.children() if hasattr(each, "product")]
    for product in held_products:
        assert isinstance(product, BlockProduct)
        held = product._weight.codes.untyped_storage().data_ptr()
        assert held == made[0].buffers.untyped_storage().data_ptr()
    codes = sum(product.num_bytes for product in held_products)
    assert placement.streamed.pass_bytes > len(placement.streamed) * codes > 0
    for _ in range(2):
        assert torch.equal(logits_of(model), expected)
    assert made[0].num_waits == 2 * len(placement.streamed)


def test_a_product_of_a_streamed_layer_has_its_codes_in_one_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's int4 product runs on GPUs only: here it is one of the test's."""
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda codes, tiles: codes.clone())
    calls: list[int] = []

    def multiply(rows: torch.Tensor, packed: torch.Tensor, *_: object) -> torch.Tensor:
        calls.append(len(rows))
        return rows.new_zeros(len(rows), len(packed))

    monkeypatch.setattr(torch, "_weight_int4pack_mm", multiply)
    scales = torch.ones(8, 2, dtype=torch.float16, device=tiny.DEVICE)
    codes = torch.zeros(8, 64, dtype=torch.int8, device=tiny.DEVICE)
    of_4 = QuantizedWeight(codes[:, :32].to(torch.uint8), scales, None, 4, 32)
    rows = torch.ones(200, 64, device=tiny.DEVICE)
    product = TensorCoreProduct(of_4)
    product(rows)
    assert calls == [] and product.num_bytes > of_4.nbytes
    smaller = product.with_less_memory()
    assert smaller(rows).shape == (200, 8) and calls == [200]
    assert smaller.num_bytes < TensorCoreProduct(of_4).num_bytes
    assert smaller.kernel != TensorCoreProduct.kernel, "their KV is not mixed"
    of_8 = QuantizedWeight(codes, scales, None, 8, 32)
    with_codes = CodesProduct if triton.is_available() else BlockProduct
    assert isinstance(TensorCoreProduct(of_8).with_less_memory(), with_codes)


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    usage = SimpleNamespace(free=64)
    monkeypatch.setattr("kvboost.model.streaming.parking.shutil.disk_usage", lambda _: usage)
    with pytest.raises(ModelError, match=r"need 16KiB on disk, and .*layers has 64B.*KVBOOST_HOME"):
        Parking(0).park(nn.Linear(64, 64, bias=False))
