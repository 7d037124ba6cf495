"""Streamed layers compute what resident ones do, to the last bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kvboost.errors import ModelError
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.streaming.disk import DiskLayers
from kvboost.model.streaming.place import decoder_layers
from kvboost.model.streaming.slabs import ALIGNMENT, SlabLayout
from support.homes import use_home
from support.streamed import LAYERS, stream, streamed_of
from support.tiny import DEVICE, tiny_model

IDS = torch.arange(7, 19)[None]


@pytest.fixture(autouse=True, scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    patch = pytest.MonkeyPatch()
    path = tmp_path_factory.mktemp("home")
    use_home(patch, path)
    yield path
    patch.undo()


def logits_of(model: nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS.to(DEVICE)).logits


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "mixtral", "gpt2", "bloom"])
def test_every_kind_of_layer_streams(name: str) -> None:
    expected = logits_of(tiny_model(name, num_hidden_layers=LAYERS))
    model = tiny_model(name, num_hidden_layers=LAYERS)
    slots, placement = stream(model, resident=(2,))
    for passes in range(1, 3):
        assert torch.equal(logits_of(model), expected)
        assert slots.num_waits == passes * (LAYERS - 1)
    assert slots.num_releases == slots.num_waits
    assert len(streamed_of(placement)) == LAYERS - 1


layers = st.sets(st.integers(0, LAYERS - 1))


@settings(max_examples=10)
@given(resident=layers, on_disk=layers, num_slots=st.integers(1, 4), end=st.integers(0, LAYERS - 1))
def test_any_split_gives_the_same_bits(
    resident: set[int], on_disk: set[int], num_slots: int, end: int
) -> None:
    if len(resident) == LAYERS:
        resident = {0}
    expected = logits_of(model := tiny_model("llama", num_hidden_layers=LAYERS))
    slots, placement = stream(model, resident, num_slots, on_disk)
    assert torch.equal(logits_of(model), expected)
    stop = decoder_layers(model)[end].register_forward_pre_hook(_stop)
    with pytest.raises(_Stopped):  # as a probe, which ends within the model
        logits_of(model)
    stop.remove()
    for _ in range(2):
        assert torch.equal(logits_of(model), expected)
    assert slots.num_waits >= 3 * (LAYERS - len(resident))
    assert streamed_of(placement).copied_bytes > 0


class _Stopped(Exception):
    pass


def _stop(module: nn.Module, args: object) -> None:
    raise _Stopped


def test_a_layer_that_fails_gives_its_slot_back() -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    expected = logits_of(model)
    slots, _ = stream(model)
    failing = decoder_layers(model)[3].mlp
    handle = failing.register_forward_pre_hook(_stop)
    with pytest.raises(_Stopped):
        logits_of(model)
    handle.remove()
    assert slots.num_releases == slots.num_waits == 4
    assert torch.equal(logits_of(model), expected)


def test_the_slots_of_these_tests_find_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    slots, _ = stream(model)
    monkeypatch.setattr(slots, "wait", lambda slot: slots._used.add(slot))
    assert logits_of(model).isnan().any()


def test_layers_from_disk_are_read_ahead_and_in_order() -> None:
    model = tiny_model("llama", num_hidden_layers=LAYERS)
    expected = logits_of(model)
    _, placement = stream(model, on_disk=range(LAYERS))
    for _ in range(3):
        assert torch.equal(logits_of(model), expected)
    on_disk = streamed_of(placement)._on_disk
    assert on_disk is not None and on_disk.num_read >= 3 * LAYERS - 1
    on_disk.close()
    assert on_disk._round == 0, "it never had to start anew"


def test_a_file_that_cannot_be_read_fails_the_forward(tmp_path: Path) -> None:
    (tmp_path / "layers").write_bytes(bytes(100))
    file = (tmp_path / "layers").open("rb")
    layers = DiskLayers(file, {0: (0, 100), 1: (100, 50)}, [torch.empty(100, dtype=torch.uint8)])
    assert len(layers.take(0)) == 100
    layers.give_back(0, SimpleNamespace(synchronize=lambda: None))
    with pytest.raises(ModelError, match="streamed layers cannot be read: it ends before byte 150"):
        layers.take(1)
    layers.close()


def test_a_slab_holds_tensors_of_any_type() -> None:
    layer = nn.Module()
    layer.codes = nn.Parameter(torch.arange(5, dtype=torch.uint8), requires_grad=False)
    layer.scale = nn.Parameter(torch.full((3, 3), 1.5, dtype=torch.bfloat16))
    layer.also = layer.scale
    layer.register_buffer("packed", torch.arange(8, dtype=torch.int32).view(2, 2, 2))
    layer.register_buffer("none", None)
    layer.register_buffer("empty", torch.empty(0, 4))
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    layout = SlabLayout(layer)
    assert layout.num_bytes == 3 * ALIGNMENT
    slab = host_memory(layout.num_bytes)
    layout.save(slab)
    other = slab.clone()
    layout.bind(other)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
        assert tensor.untyped_storage().data_ptr() == other.data_ptr() or not tensor.numel()
    other.zero_()
    assert not layer.packed.any() and not layer.also.any()
