"""Attention of a tile of rows to tiles of keys: in pages, row by row or a page at a time, or in one
piece. Results so far come in, and go out with these keys added to them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvboost.model.triton.scores import (
    factor_of,
    is_present,
    page_of,
    product,
    row_offsets,
    scores_of,
)


@triton.jit
def _weigh(scores, total, best, factor):
    """Weights of keys, what earlier results fade by, and the new total and best score."""
    new_best = tl.maximum(best, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_best[:, None])
    fade = tl.exp2(best - new_best)
    return weights, fade, total * fade + tl.sum(weights, 1), new_best


@triton.jit
def attend_keys(
    acc, total, best, query, position, pages, table, absent, head, first, last,
    end, page_stride, head_stride, token_stride, scale, cap, window,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Attends to the tiles of keys ``[first, last)``. Every row sees them all unless ``MASKED``."""
    channel = tl.arange(0, WIDE)
    inside = channel < DIM
    factor = factor_of(scale, cap)
    # The pages of the next tile are read while this one is computed, so that loads of keys and
    # values wait for no other load.
    page = page_of(table, first * KEYS + tl.arange(0, KEYS), end, PAGE)
    for number in range(first, last):
        key = number * KEYS + tl.arange(0, KEYS)
        present = is_present(key, absent, end) if MASKED else key >= 0
        at = row_offsets(page, number, head, page_stride, head_stride, token_stride, PAGE, KEYS)
        page = page_of(table, key + KEYS, end, PAGE)
        key_at = pages + at[None, :] + channel[:, None]
        value_at = pages + at[:, None] + (DIM + channel[None, :])
        if MASKED or WIDE != DIM:
            keys = tl.load(key_at, mask=present[None, :] & inside[:, None], other=0.0)
        else:
            keys = tl.load(key_at)
        scores = product(query, keys)
        scores = scores_of(scores, position, key, present, scale, cap, window, MASKED)
        weights, fade, total, best = _weigh(scores, total, best, factor)
        if MASKED or WIDE != DIM:
            values = tl.load(value_at, mask=present[:, None] & inside[None, :], other=0.0)
        else:
            values = tl.load(value_at)
        acc = acc * fade[:, None] + product(weights.to(values.dtype), values)
    return acc, total, best


@triton.jit
def attend_latents(
    acc, total, best, query, rotated, position, pages, table, absent, first, last,
    end, page_stride, head_stride, token_stride, scale, cap, window,
    DIM: tl.constexpr, WIDE: tl.constexpr, ROTATED: tl.constexpr, TURNS: tl.constexpr,
    PAGE: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As ``attend_keys``, over rows that are keys and values in one: the ``DIM`` channels after the
    first ``ROTATED`` ones are the value. ``query`` and ``rotated`` are these parts of queries."""
    channel, turn = tl.arange(0, WIDE)[None, :], tl.arange(0, TURNS)[None, :]
    factor = factor_of(scale, cap)
    page = page_of(table, first * KEYS + tl.arange(0, KEYS), end, PAGE)
    for number in range(first, last):
        key = number * KEYS + tl.arange(0, KEYS)
        present = is_present(key, absent, end) if MASKED else key >= 0
        at = row_offsets(page, number, 0, page_stride, head_stride, token_stride, PAGE, KEYS)
        page = page_of(table, key + KEYS, end, PAGE)
        row_at = pages + at[:, None]
        if MASKED or WIDE != DIM:
            inside = present[:, None] & (channel < DIM)
            latents = tl.load(row_at + (ROTATED + channel), mask=inside, other=0.0)
        else:
            latents = tl.load(row_at + (ROTATED + channel))
        if MASKED or TURNS != ROTATED:
            turned = tl.load(row_at + turn, mask=present[:, None] & (turn < ROTATED), other=0.0)
        else:
            turned = tl.load(row_at + turn)
        scores = product(query, latents.T) + product(rotated, turned.T)
        scores = scores_of(scores, position, key, present, scale, cap, window, MASKED)
        weights, fade, total, best = _weigh(scores, total, best, factor)
        acc = acc * fade[:, None] + product(weights.to(latents.dtype), latents)
    return acc, total, best


@triton.jit
def attend_pages(
    acc, total, best, query, position, whole, table, head, first, last, scale, cap,
    DIM: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As ``attend_keys``, over whole pages: a tile of keys is a page, which ``whole`` loads."""
    factor = factor_of(scale, cap)
    # As above. A mask would make the compiler run all products one after another.
    page = tl.load(table + tl.maximum(0, tl.minimum(first, last - 1)))
    for number in range(first, last):
        at = (page * tl.num_programs(0) + head) * KEYS
        page = tl.load(table + tl.minimum(number + 1, last - 1))
        key = number * KEYS + tl.arange(0, KEYS)
        scores = product(query, whole.load([at, 0]).T)
        scores = scores_of(scores, position, key, key >= 0, scale, cap, None, MASKED)
        weights, fade, total, best = _weigh(scores, total, best, factor)
        values = whole.load([at, DIM])
        acc = acc * fade[:, None] + product(weights.to(values.dtype), values)
    return acc, total, best


@triton.jit
def attend_cut_page(
    acc, total, best, query, position, whole, table, head, number, end, scale, cap,
    DIM: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """As ``attend_pages``, for a page in which anything may follow the key before ``end``."""
    at = (tl.load(table + number) * tl.num_programs(0) + head) * KEYS
    key = number * KEYS + tl.arange(0, KEYS)
    scores = product(query, whole.load([at, 0]).T)
    scores = scores_of(scores, position, key, key < end, scale, cap, None, True)
    weights, fade, total, best = _weigh(scores, total, best, factor_of(scale, cap))
    values = tl.where((key < end)[:, None], whole.load([at, DIM]), 0.0)
    acc = acc * fade[:, None] + product(weights.to(values.dtype), values)
    return acc, total, best


@triton.jit
def attend_latent_pages(
    acc, total, best, query, rotated, position, whole, turns, table, first, last, end, scale, cap,
    ROTATED: tl.constexpr, KEYS: tl.constexpr, MASKED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """As ``attend_latents``, over whole pages, as ``attend_pages``. ``turns`` loads what rotates.
    Anything may follow the key before ``end`` if pages are ``CUT``."""
    factor = factor_of(scale, cap)
    page = tl.load(table + tl.maximum(0, tl.minimum(first, last - 1)))
    for number in range(first, last):
        at = page * KEYS
        page = tl.load(table + tl.minimum(number + 1, last - 1))
        key = number * KEYS + tl.arange(0, KEYS)
        latents = whole.load([at, ROTATED])
        scores = product(query, latents.T) + product(rotated, turns.load([at, 0]).T)
        scores = scores_of(scores, position, key, key < end, scale, cap, None, MASKED)
        weights, fade, total, best = _weigh(scores, total, best, factor)
        if CUT:
            latents = tl.where((key < end)[:, None], latents, 0.0)
        acc = acc * fade[:, None] + product(weights.to(latents.dtype), latents)
    return acc, total, best


@triton.jit
def attend_dense_keys(
    acc, total, best, query, position, keys, values, begin, first, last, end, scale, cap,
    KEYS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As ``attend_keys``, over tensors whose rows from ``begin`` on are the keys and values."""
    factor = factor_of(scale, cap)
    for number in range(first, last):
        key = number * KEYS + tl.arange(0, KEYS)
        scores = product(query, keys.load([begin + number * KEYS, 0]).T)
        scores = scores_of(scores, position, key, key < end, scale, cap, None, MASKED)
        weights, fade, total, best = _weigh(scores, total, best, factor)
        found = values.load([begin + number * KEYS, 0])
        acc = acc * fade[:, None] + product(weights.to(found.dtype), found)
    return acc, total, best
