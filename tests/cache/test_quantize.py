from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvboost.cache.quantize import (
    BITS,
    FIRST_ROWS,
    GROUP,
    KVData,
    KVFormat,
    NewRows,
    Quantizer,
    join_heads,
    plain,
    usable_rows,
)
from kvboost.reuse.rope import Rotation

LAYERS, HEADS, DIM = 2, 2, 8
ROTATION = Rotation(torch.tensor([[1.0, 0.1, 0.01], [0.5, 0.3, 0.0]]))


def rows_at(position: int, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Keys whose channels have offsets, as real ones do, rotated to their positions."""
    draw = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, HEADS, num_tokens, DIM, generator=draw)
    kv[0] += 10 * torch.randn(LAYERS, HEADS, 1, DIM, generator=draw)
    kv[0] = ROTATION.rotate_to(kv[0], position)
    return kv


def unpacked(
    packer: Quantizer, data: KVData, base: int, offset: int, at: int, n: int
) -> torch.Tensor:
    out = torch.full((2, LAYERS, HEADS, n, DIM), float("nan"))
    packer.place(data, base, offset, at, out)
    return out


def slow_reference(rows: torch.Tensor, position: int, bits: int) -> torch.Tensor:
    """What 8 or 4 bits leave of ``rows``, group by group and row by row."""
    levels = 2**bits - 1
    num_tokens = rows.shape[3]
    bare = ROTATION.rotate_to(rows[0], position, back=True)
    values = rows[1].clone()
    first = max(0, FIRST_ROWS - position)

    def rounded(some: torch.Tensor) -> torch.Tensor:
        least = some.min().half()
        step = ((some.max() - least.float()) / levels).clamp(min=1e-6).half().float()
        return ((some - least.float()) / step).round().clamp(0, levels) * step + least.float()

    for layer in range(LAYERS):
        for head in range(HEADS):
            for start in range(0, num_tokens // GROUP * GROUP, GROUP):
                begin = max(start, min(first, num_tokens - 1))
                for channel in range(DIM):
                    group = bare[layer, head, begin : start + GROUP, channel]
                    bare[layer, head, begin : start + GROUP, channel] = rounded(group)
            for row in range(first, num_tokens):
                values[layer, head, row] = rounded(values[layer, head, row])
    return torch.stack([ROTATION.rotate_to(bare, position), values])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("position", "num_tokens"), [(0, 70), (2, 33), (100, 64), (7, 5), (0, 3)])
def test_packing_equals_the_slow_reference(bits, position, num_tokens) -> None:
    rows = rows_at(position, num_tokens)
    packer = Quantizer(bits, ROTATION)
    data = packer.pack(rows, position)
    assert data.bits == bits and data.num_tokens == num_tokens
    back = unpacked(packer, data, position, 0, position, num_tokens)
    expected = slow_reference(rows, position, bits)
    # A value between two codes may be rounded to either.
    step = 2 * (rows.amax() - rows.amin()) / (2**bits - 1)
    assert (back - expected).abs().max() < 0.6 * step
    assert ((back - expected).abs() > 1e-3).float().mean() < 0.01


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.12)])
def test_the_error_is_small_and_the_first_and_last_keys_are_kept_in_full(bits, most) -> None:
    rows = rows_at(0, 2 * GROUP + 9)
    packer = Quantizer(bits, ROTATION)
    data = packer.pack(rows, 0)
    back = unpacked(packer, data, 0, 0, 0, rows.shape[3])
    assert torch.equal(back[:, :, :, :FIRST_ROWS], rows[:, :, :, :FIRST_ROWS])
    assert torch.equal(back[0, :, :, 2 * GROUP :], rows[0, :, :, 2 * GROUP :])
    for made, given_ in zip(back, rows, strict=True):
        assert 0 < (made - given_).norm() / given_.norm() < most
    whole = packer.pack(rows_at(9, 4 * GROUP), 9)
    numbers = 2 * LAYERS * HEADS * 4 * GROUP * DIM
    assert whole.nbytes < numbers * bits / 8 + numbers  # codes, and ranges of so small a head


@settings(max_examples=50)
@given(st.sampled_from([16, 8, 4]), st.integers(0, 9), st.integers(1, 80), st.data())
def test_any_part_can_be_placed_at_any_position(bits, base, num_tokens, data) -> None:
    """A part of a packed chunk at another place is what all of it is there."""
    offset = data.draw(st.integers(0, num_tokens - 1))
    count = data.draw(st.integers(1, num_tokens - offset))
    position = data.draw(st.integers(0, 200))
    packer = Quantizer(bits, ROTATION)
    packed = packer.pack(rows_at(base, num_tokens), base)
    whole = unpacked(packer, packed, base, 0, base, num_tokens)
    keys = torch.empty_like(whole[0])
    ROTATION.move(whole[0], position - (base + offset), keys)
    part = unpacked(packer, packed, base, offset, position, count)
    rows = slice(offset, offset + count)
    assert torch.allclose(part[0], keys[:, :, rows], atol=2e-4)
    assert torch.equal(part[1], whole[1][:, :, rows])


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_rows_are_copied_and_not_quantized_again(bits) -> None:
    """A chunk that grows row by row equals one that is packed at once."""
    packer = Quantizer(bits, ROTATION)
    rows = rows_at(0, 100)
    data = packer.pack(rows[:, :, :, :3], 0)
    have = 3
    while have < 100:
        grown = min(100, have + 7)
        # What a request has of the known part is what was unpacked.
        current = rows[:, :, :, :grown].clone()
        packer.place(data, 0, 0, 0, current[:, :, :, :have])
        data, have = packer.pack(current, 0, data, have), grown
    at_once = packer.pack(rows, 0)
    for name, tensor in at_once.tensors.items():
        assert torch.allclose(data.tensors[name].float(), tensor.float(), atol=1e-3), name


def test_a_quantized_chunk_is_not_cut_inside_a_group() -> None:
    assert usable_rows(16, 100, 37) == 37
    assert [usable_rows(8, 100, n) for n in (5, 32, 37, 95, 96, 97, 100)] == [
        0,
        32,
        32,
        64,
        96,
        97,
        100,
    ]


def test_numbers_that_half_precision_cannot_hold_are_kept_in_full() -> None:
    rows = rows_at(0, 40) * 1e6
    assert Quantizer(4, ROTATION).pack(rows, 0).bits == 16


def test_models_without_rotation_can_be_quantized() -> None:
    rows = rows_at(0, 64)
    packer = Quantizer(8, None)
    back = unpacked(packer, packer.pack(rows, 0), 0, 0, 0, 64)
    assert (back - rows).norm() / rows.norm() < 0.01


def test_plain_rows_are_copied() -> None:
    rows = rows_at(0, 8)
    data = Quantizer(16, ROTATION).pack(rows[:, :, :, 2:6], 2)
    rows.zero_()
    assert data.tensors["kv"].abs().sum() > 0
    assert data.nbytes == plain(rows[:, :, :, 2:6].contiguous()).nbytes


@settings(max_examples=60)
@given(st.sampled_from([16, 8, 4]), st.integers(0, 40), st.integers(1, 100), st.booleans())
def test_every_packed_chunk_has_the_format_of_its_model(bits, position, num_tokens, half) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    rows = rows_at(position, num_tokens).to(dtype)
    data = Quantizer(bits, ROTATION).pack(rows, position)
    model = KVFormat(LAYERS, HEADS, DIM, dtype, bits)
    assert model.describes(data.bits, num_tokens, position, data.tensors)
    assert KVFormat.of(data.bits, data.tensors) == model
    # And of no other model, length or beginning.
    others = [
        KVFormat(LAYERS + 1, HEADS, DIM, dtype, bits),
        KVFormat(LAYERS, HEADS + 1, DIM, dtype, bits),
        KVFormat(LAYERS, HEADS, DIM + 2, dtype, bits),
        KVFormat(LAYERS, HEADS, DIM, torch.float16, bits),
    ]
    for other in others:
        assert not other.describes(data.bits, num_tokens, position, data.tensors)
    assert not model.describes(data.bits, num_tokens + 1, position, data.tensors)
    renamed = {f"{name}_": tensor for name, tensor in data.tensors.items()}
    assert not model.describes(data.bits, num_tokens, position, renamed)
    assert not model.describes(data.bits, num_tokens, position, {})


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_heads_taken_apart_are_those_of_smaller_models(bits) -> None:
    """A rank that holds some heads stores what the whole model would store of them."""
    rows = rows_at(2, 40)
    packer = Quantizer(bits, ROTATION)
    whole = packer.pack(rows, 2)
    parts = [whole.heads(head, head + 1) for head in range(HEADS)]
    for head, part in enumerate(parts):
        alone = packer.pack(rows[:, :, head : head + 1], 2)
        assert part.tensors.keys() == alone.tensors.keys()
        assert all(torch.equal(part.tensors[name], alone.tensors[name]) for name in alone.tensors)
    joined = join_heads(parts)
    assert joined.bits == bits
    assert all(torch.equal(joined.tensors[name], whole.tensors[name]) for name in whole.tensors)


def test_rows_that_cannot_be_quantized_have_the_format_of_their_model_too() -> None:
    rows = rows_at(0, 40)
    rows[0, 0, 0, 20, 0] = float("inf")
    data = Quantizer(8, ROTATION).pack(rows, 0)
    assert data.bits == 16
    model = KVFormat(LAYERS, HEADS, DIM, torch.float32, 8)
    assert model.describes(16, 40, 0, data.tensors)


@pytest.mark.parametrize("bits", BITS)
def test_parts_are_packed_as_they_would_be_one_by_one(bits: int) -> None:
    packer = Quantizer(bits, ROTATION)
    start, ends = 5, (5 + 64, 5 + 128, 5 + 168)
    rows = rows_at(start, ends[-1] - start)
    like = packer.pack(rows[:, :, :, :40], start)
    parts = [NewRows(start, ends[0], like, 40), *map(NewRows, ends, ends[1:])]
    for packed, part in zip(packer.pack_all(rows, parts), parts, strict=True):
        some = rows[:, :, :, part.start - start : part.end - start]
        alone = packer.pack(some, part.start, part.like, part.common)
        assert packed.bits == alone.bits
        for name, tensor in alone.tensors.items():
            found = packed.tensors[name]
            assert torch.equal(found, tensor) and found.is_contiguous()
            assert found.untyped_storage().nbytes() == found.nbytes  # of its own
