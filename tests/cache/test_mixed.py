from __future__ import annotations

import pytest
import torch

from kvboost.cache.mixed import (
    MixedFormat,
    format_of,
    group_of,
    is_plain,
    join_groups,
    num_groups,
    states_of,
)
from kvboost.cache.quantize import KVFormat, Quantizer

LARGE, SMALL = KVFormat(2, 2, 8, torch.float32), KVFormat(1, 1, 4, torch.float32)
STATE = torch.float32, (3, 5)
ROWS = [torch.randn(2, 2, 2, 70, 8), torch.randn(2, 1, 1, 70, 4)]


def packed(bits: int, position: int = 0) -> list:
    return [Quantizer(bits, None).pack(rows, position) for rows in ROWS]


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_groups_are_joined_and_told_apart(bits) -> None:
    groups, states = packed(bits), [torch.randn(3, 5)]
    data = join_groups(groups, states)
    assert (data.bits, data.num_tokens, num_groups(data)) == (bits, 70, 2)
    assert data.nbytes == sum(group.nbytes for group in groups) + states[0].nbytes
    assert [one.tolist() for one in states_of(data)] == [states[0].tolist()]
    for number, group in enumerate(groups):
        found = group_of(data, number)
        assert found.bits == bits and found.tensors.keys() == group.tensors.keys()
        assert all(torch.equal(found.tensors[name], group.tensors[name]) for name in group.tensors)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_chunk_has_the_format_of_its_model_and_of_no_other(bits) -> None:
    formats = [KVFormat(*sizes, torch.float32, bits) for sizes in ((2, 2, 8), (1, 1, 4))]
    model = MixedFormat(tuple(formats), (STATE,))
    with_state = join_groups(packed(bits), [torch.randn(3, 5)])
    without = join_groups(packed(bits))
    for data in (with_state, without):
        assert model.describes(bits, 70, 0, data.tensors)
        assert not model.describes(bits, 71, 0, data.tensors)
        assert not MixedFormat(tuple(reversed(formats)), (STATE,)).describes(
            bits, 70, 0, data.tensors
        )
        assert data.nbytes <= model.most_bytes(70, 0)
    assert not MixedFormat(tuple(formats)).describes(bits, 70, 0, with_state.tensors)
    assert format_of(bits, with_state.tensors) == model
    for name in without.tensors:
        fewer = {other: one for other, one in without.tensors.items() if other != name}
        assert not model.describes(bits, 70, 0, fewer)
        for renamed in (f"{name}.7", f"{name}.0", f"{name}.01", f"x{name}"):
            assert not model.describes(bits, 70, 0, fewer | {renamed: without.tensors[name]})
    assert not model.describes(bits, 70, 0, without.tensors | {"state.1": torch.randn(3, 5)})


def test_rows_that_are_keys_and_values_in_one_are_stored_once() -> None:
    rows = torch.randn(1, 2, 1, 40, 8)
    data = Quantizer(16, None).pack(rows, 0)
    assert data.nbytes == rows.nbytes and data.num_tokens == 40
    assert not is_plain(data.tensors)
    latent = KVFormat(2, 1, 8, torch.float32, sides=1)
    assert format_of(16, data.tensors) == MixedFormat((latent,))
    out = torch.empty(1, 2, 1, 10, 8)
    Quantizer(16, None).place(data, 0, 5, 5, out)
    assert torch.equal(out, rows[:, :, :, 5:15])


def test_a_plain_chunk_is_not_mixed() -> None:
    for bits in (16, 8):
        assert is_plain(Quantizer(bits, None).pack(ROWS[0], 0).tensors)
    assert not is_plain(join_groups(packed(8)).tensors)
