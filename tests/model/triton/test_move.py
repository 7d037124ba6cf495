"""Stored rows in pages, against rows rotated and copied one span at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvboost.model.triton.move import MovePlan, Source, StoredSpan, move
from kvboost.model.triton.pages import PagedLayers, slots_of
from kvboost.reuse.rope import Rotation
from support.paged_kv import dense, each_dtype, make_pages, make_tables, random
from support.tiny import DEVICE

LAYERS, KV_HEADS, PAGE = 2, 2, 16


def make_layers(dim: int, dtype: torch.dtype, layout: str) -> PagedLayers:
    return PagedLayers([make_pages(12, KV_HEADS, PAGE, dim, dtype, layout) for _ in range(LAYERS)])


def source(tokens: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return random(2, LAYERS, KV_HEADS, tokens, dim, dtype=dtype)


def turns_of(rotation: Rotation, distances: list[int]) -> np.ndarray:
    """``[2, layers, rotations, pairs]``; the rotation by a distance is that to a position."""
    at = torch.tensor(distances)
    parts = [torch.stack(rotation.cos_sin(layer, at)) for layer in range(LAYERS)]
    return torch.stack(parts, 1).numpy()


@pytest.mark.parametrize(
    ("layout", "interleaved", "dtype"),
    [
        ("heads first", False, torch.float32),
        ("tokens first", False, torch.bfloat16),
        ("pages inside", True, torch.float32),
    ],
)
def test_rows_are_rotated_into_the_pages_of_all_layers(
    layout: str, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    dim, pairs = 48, 20  # the last 8 channels do not rotate
    layers = make_layers(dim, dtype, layout)
    table = make_tables(1, 9, 12)[0]
    before = [pages.clone() for pages in layers.pages]
    spans = [
        StoredSpan(Source(source(40, dim, dtype)), 3, 37, 16, 0),
        StoredSpan(Source(source(25, dim, dtype)), 0, 25, 100, 1),  # over borders of pages
        StoredSpan(Source(source(80, dim, dtype)[:, :, :, 10:70]), 59, 1, 0, 2),  # strided
        StoredSpan(Source(source(70, dim, dtype)), 1, 33, 56, 1),  # rotated as another one
    ]
    rotation = Rotation(torch.rand(LAYERS, pairs), interleaved=interleaved)
    distances = [13, 100, -59]
    (rows,) = MovePlan.of([spans], turns_of(rotation, distances), table, layers)
    move(rows, layers, interleaved=interleaved)
    touched = []
    for span in spans:
        distance = distances[span.rotation]
        stored = span.source.tensor[:, :, :, span.start : span.start + span.num_rows]
        keys = torch.empty_like(stored[0])
        rotation.move(stored[0], distance, keys)
        positions = torch.arange(span.position, span.position + span.num_rows, device=DEVICE)
        touched.append(slots_of(positions, table, PAGE))
        for number, pages in enumerate(layers.pages):
            found = dense(pages, table)[:, :, positions]
            if dtype == torch.float32:
                assert torch.allclose(found[0], keys[number], rtol=1e-5, atol=1e-5)
            else:  # rounded once, so at most the last bit differs
                assert torch.allclose(found[0], keys[number], rtol=2**-7, atol=1e-5)
            assert torch.equal(found[1], stored[1, number])
    others = torch.ones(12 * PAGE, dtype=torch.bool, device=DEVICE)
    others[torch.cat(touched)] = False
    for pages, old in zip(layers.pages, before, strict=True):
        rows_of = [part.transpose(1, 2).flatten(0, 1)[others] for part in (pages, old)]
        assert torch.equal(*rows_of)  # no other row is written


def test_a_span_goes_over_pages_of_its_source() -> None:
    layers = make_layers(32, torch.float32, "heads first")
    table = make_tables(1, 9, 12)[0]
    slab = random(LAYERS, 5, KV_HEADS, 64, 2 * 32, dtype=torch.float32)  # five pages of 64 rows
    pages = slab.unflatten(-1, (2, -1)).permute(4, 1, 0, 2, 3, 5)  # [2, 5, layers, heads, 64, 32]
    turn = np.stack([np.ones((1, 1, 4), np.float32), np.zeros((1, 1, 4), np.float32)])
    numbers, start, count, position = [4, 1, 2], 50, 100, 7
    span = StoredSpan(
        Source(pages[:, 0], page_step=KV_HEADS * 64), start, count, position, 0, numbers
    )
    move(*MovePlan.of([[span]], turn, table, layers), layers)
    stored = torch.cat([pages[:, number] for number in numbers], 3)[:, :, :, start : start + count]
    positions = torch.arange(position, position + count, device=DEVICE)
    for layer, target in enumerate(layers.pages):
        assert torch.equal(dense(target, table)[:, :, positions], stored[:, layer])
    beyond = span._replace(start=3 * 64 - count + 1)
    with pytest.raises(ValueError, match="its source has 192 rows"):
        MovePlan.of([[beyond]], turn, table, layers)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_that_are_keys_and_values_in_one_rotate_in_their_first_channels(
    interleaved: bool,
) -> None:
    pages = [make_pages(12, 1, PAGE, 20, torch.float32, "heads first") for _ in range(LAYERS)]
    layers, table = PagedLayers(pages), make_tables(1, 9, 12)[0]
    rotation = Rotation(torch.rand(LAYERS, 4), interleaved=interleaved)
    stored = random(1, LAYERS, 1, 30, 40)
    spans = [StoredSpan(Source(stored), 3, 27, 50)]
    (rows,) = MovePlan.of([spans], turns_of(rotation, [47]), table, layers)
    move(rows, layers, interleaved=interleaved)
    expected = torch.empty_like(stored[0, :, :, 3:])
    rotation.move(stored[0, :, :, 3:], 47, expected)
    for number, layer in enumerate(layers.pages):
        found = layer[table.long()].transpose(0, 1).flatten(1, 2)[:, 50:77]
        assert torch.allclose(found, expected[number], rtol=1e-5, atol=1e-5)
        assert torch.equal(found[..., 8:], stored[0, number, :, 3:, 8:])


def test_layers_that_rotate_alike_share_one_table() -> None:
    layers = make_layers(32, torch.float32, "tokens first")
    table = make_tables(1, 4, 12)[0]
    rotation = Rotation(torch.rand(1, 16).expand(LAYERS, 16))
    spans = [StoredSpan(Source(source(33, 32, torch.float32)), 0, 33, 5)]
    assert rotation.turns([5]).shape == (2, 1, 1, 16)
    move(*MovePlan.of([spans], rotation.turns([5]), table, layers), layers)
    given = [pages.clone() for pages in layers.pages]
    move(*MovePlan.of([spans], turns_of(rotation, [5]), table, layers), layers)
    assert all(torch.equal(*both) for both in zip(given, layers.pages, strict=True))
    expected = torch.empty_like(spans[0].source.tensor[0])
    rotation.move(spans[0].source.tensor[0], 5, expected)
    found = dense(layers.pages[1], table)[0][:, 5:38]
    assert torch.allclose(found, expected[1], rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    layers = make_layers(32, torch.float32, "tokens first")
    table = make_tables(1, 4, 12)[0]
    data, turn = source(20, 32, torch.float32), np.ones((2, 1, 1, 16), np.float32)
    for span, message in [
        (StoredSpan(Source(data), 5, 16, 0), "moves rows 5 to 21 to 0; its source has 20 rows"),
        (StoredSpan(Source(data), 0, 16, 49), "the request's pages 64"),
        (StoredSpan(Source(data), -1, 4, 0), "span 0 moves 4 rows from -1 to 0"),
        (StoredSpan(Source(data), 0, 0, 0), "span 0 moves 0 rows"),
        (StoredSpan(Source(data[:, :1]), 0, 4, 0), "the pages need torch.float32"),
        (StoredSpan(Source(data.bfloat16()), 0, 4, 0), "span 0 is torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            MovePlan.of([[span]], turn, table, layers)
    with pytest.raises(ValueError, match="no spans to move"):
        MovePlan.of([], turn, table, layers)
    with pytest.raises(ValueError, match="span 1 moves 0 rows"):
        each = [StoredSpan(Source(data), 0, 4, 0), StoredSpan(Source(data), 0, 0, 0)]
        MovePlan.of([each], turn, table, layers)
    with pytest.raises(ValueError, match=r"turns have shape \(2, 1, 1, 16\).* and 2 rotations"):
        MovePlan.of([[StoredSpan(Source(data), 0, 4, 0, 1)]], turn, table, layers)
    with pytest.raises(ValueError, match="all layers must be alike"):
        PagedLayers([layers.first, layers.first[:, :, :8]])


@each_dtype
def test_rows_that_stay_in_place_keep_their_bits(dtype: torch.dtype) -> None:
    """Signs of zeros too."""
    layers = make_layers(32, dtype, "heads first")
    table = make_tables(1, 4, 12)[0]
    stored = source(40, 32, dtype)
    stored[:, :, :, ::3] *= 0.0
    turns = turns_of(Rotation(torch.rand(LAYERS, 16)), [0])
    move(*MovePlan.of([[StoredSpan(Source(stored), 0, 40, 7)]], turns, table, layers), layers)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for number, pages in enumerate(layers.pages):
        found = dense(pages, table)[:, :, 7:47]
        assert torch.equal(found.contiguous().view(bits), stored[:, number].contiguous().view(bits))
    assert (torch.signbit(stored[0]) & (stored[0] == 0)).any()
