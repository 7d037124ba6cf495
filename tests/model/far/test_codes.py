"""Far rows in 8 and 4 bits: close to what was written, and attended to as they are decoded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from kvboost.cache.quantize import RowCodec
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.partial_attention import attend_part
from kvboost.model.far import codes
from kvboost.model.far.coded_kv import CodedKV
from kvboost.model.far.codes import CodedMemory, CodedRows, CodeLayout, coded_bytes
from kvboost.model.far.costs import FarCosts
from kvboost.model.far.place import FarPlace, on_host
from kvboost.model.far.slots import Slots
from kvboost.model.far.streamed import StreamedAttention
from support.far_kv import LateTransfers, poison
from support.tiny import DEVICE, make_engine, tiny_model

SHAPE = KVShape(2, 2, 16, torch.float32, torch.device("cpu"))
ERRORS = {8: 0.02, 4: 0.4}
"""The most that a number between about -4 and 4 may change."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "BLOCK", 64)


def random_rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 2, 2, count, 16, generator=torch.Generator().manual_seed(seed))


def streamed(shape: KVShape, codec: RowCodec) -> StreamedAttention:
    slot_bytes = 2 * CodeLayout(shape, codec).block_bytes
    slots = Slots(shape, 2 * 64, LateTransfers(), slot_bytes)
    poison(slots._data)
    return StreamedAttention(slots, FarCosts(), None)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_close_to_what_was_written_and_attended_to_as_read(bits: int) -> None:
    codec = RowCodec(bits)
    memory = CodedMemory(SHAPE, 300, codec)
    assert memory.num_bytes < SHAPE.row_bytes * 320 * (bits + 3) / 32
    rows = random_rows(288)
    for start, end in ((96, 288), (0, 96)):
        memory.write(start, rows[:, :, :, start:end])
    for layer, (start, end) in enumerate(((0, 288), (70, 200))):
        read = memory.read(layer, start, end)
        assert (read - rows[:, layer, :, start:end]).abs().max() < ERRORS[bits]
    assert torch.equal(memory.read(1, 0, 32), rows[:, 1, :, :32]), "the first rows are kept in full"
    attention = streamed(SHAPE, codec)
    query = torch.randn(1, 4, 3, 16)
    out, sums = CodedRows(memory, 288, attention).attend(1, query, 0.3)
    read = memory.read(1, 0, 288)
    expected = attend_part(query, read[:1], read[1:], 0.3)
    assert torch.allclose(out, expected[0], atol=1e-5)
    assert torch.allclose(sums, expected[1], atol=1e-5)
    assert attention.num_streamed == 1


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_the_cache_are_placed_in_any_order_and_the_rest_is_near() -> None:
    codec, rows = RowCodec(8), random_rows(300)
    attention = streamed(SHAPE, codec)
    kv = CodedKV(SHAPE, 400, 256, lambda count: CodedMemory(SHAPE, count, codec), attention)
    for start, end in ((100, 150), (0, 41), (150, 203), (41, 45), (45, 100)):
        with kv.filling(start, end) as place:
            place.copy_(rows[:, :, :, start:end])
    kv.prepare(203, 300)
    assert kv.far_rows == kv.start == 192 and kv.capacity == 192 + 256
    for layer in range(2):
        kv.write(layer, range(203, 300), *rows[:, layer : layer + 1, :, 203:])
    assert (kv.rows(0, 300) - rows).abs().max() < ERRORS[8]
    assert torch.equal(kv.rows(192, 300), rows[:, :, :, 192:]), "near rows are as they were"
    kv.prepare(300, 428)
    kv.prepare(428, 500)
    assert kv.far_rows > 192 and kv.far_rows % 32 == 0
    assert (kv.rows(0, 300) - rows).abs().max() < ERRORS[8]
    with pytest.raises(RuntimeError, match="do not change"):
        kv.reserve(2000)
    kv.close()


@pytest.mark.skipif(DEVICE != "cpu", reason="its device is one that tests make up")
@pytest.mark.usefixtures("small_blocks")
def test_a_request_with_far_rows_of_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    codec, made = RowCodec(8), []

    def another_device(shape: KVShape, folder: object) -> FarPlace:
        def attention() -> StreamedAttention:
            made.append(streamed(shape, codec))
            return made[0]

        memory: Any = partial(CodedMemory, shape, codec=codec)
        return FarPlace(CodedKV, memory, partial(coded_bytes, shape, codec), attention)

    monkeypatch.setattr("kvboost.runtime.devices.in_file", another_device)
    model = tiny_model("llama", max_position_embeddings=1024, num_hidden_layers=2)
    prompt = [(7 * number + 3) % 250 for number in range(700)]
    options = {"max_kv_bytes": 560 * 512, "far_kv_bytes": "1MiB", "chunk_size": 64}
    with make_engine(model, heal="off", reuse_moved="always", **options) as engine:
        engine.generate(prompt[:300], 1, ignore_eos=True)
        chunks = engine.cache_stats()["hot_chunks"]
        first = engine.generate(prompt, 3, ignore_eos=True)
        assert first.exact_tokens == 300 and made[0].num_streamed > 0
        moved = engine.generate([1, 2, *prompt], 3, ignore_eos=True)
        assert moved.reuse.cached_tokens == 0 and "fewer bits" in moved.reuse.notes[0]
        assert engine.cache_stats()["hot_chunks"] == chunks, "rounded rows are not kept"
        assert engine.cache_stats()["far_kv_bytes"] == 0


def test_memory_on_a_host_counts_codes_slots_and_what_is_decoded() -> None:
    shape = KVShape(28, 4, 128, torch.bfloat16, torch.device("cuda"))
    plain, coded = on_host(shape, 1 << 30), on_host(shape, 1 << 30, RowCodec(4))
    assert plain.far_bytes(1024) == 1024 * shape.row_bytes
    assert 0.25 < coded.far_bytes(1024) / plain.far_bytes(1024) < 0.32
    assert plain.near_bytes == 2 * (64 << 20) and coded.near_bytes < (300 << 20)
