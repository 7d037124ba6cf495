"""The longest prefix that a running request has in place is the one that is shared."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.runtime.request import RequestState
from kvboost.runtime.sharing import GRID, LEAST_SHARED, RunningRequests
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, common_prefix
from support.requests import request_of

SHAPE = KVShape(1, 1, 2, torch.float32, torch.device("cpu"))
TEXT = as_token_ids(np.arange(1000))
ROOT = ChunkKey("root")


def state_of(token_ids: TokenIds) -> RequestState:
    state = RequestState(request_of(token_ids))
    state.batched = True
    return state


def text_with(common: int, more: int) -> TokenIds:
    """The first ``common`` tokens of the text, and ``more`` others."""
    return as_token_ids(np.r_[TEXT[:common], np.full(more, 7)])


places = st.integers(450, 900)


@given(
    st.lists(st.tuples(places, st.integers(0, 99), st.integers(450, 1100)), max_size=4),
    places,
    st.integers(1, 99),
)
def test_the_longest_common_prefix_is_found(
    others: list[tuple[int, int, int]], common: int, more: int
) -> None:
    """Of requests that begin as the text does, each with so many rows in place; some have more of
    them than tokens in their prompts."""
    running = RunningRequests()
    request = state_of(text_with(common, more)).request
    expected = 0
    with ExitStack() as stack:
        for length, rest, rows in others:
            state = state_of(text_with(length, rest))
            state.rows = rows
            stack.enter_context(running.register(state, ROOT, RequestKV(SHAPE, 1)))
            usable = common_prefix(state.request.token_ids, request.token_ids)
            usable = min(usable, rows, len(request.token_ids) - 1)
            expected = max(expected, usable // GRID * GRID)
        assert running.num_shared(request, ROOT) == (expected if expected >= LEAST_SHARED else 0)
        assert running.num_shared(request, ChunkKey("other")) == 0
