from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import tensors_of
from kvboost.integrations.vllm.states import StatePages

PAGES = 6


def layer(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """A convolution's state and a recurrent one, as vLLM lays them out: beside each other."""
    memory = torch.randn(PAGES, 30, generator=torch.Generator().manual_seed(seed))
    return [memory[:, :6].view(PAGES, 3, 2), memory[:, 6:30].view(PAGES, 2, 3, 4).to(dtype)]


def test_states_are_those_that_were_written() -> None:
    layers = [layer(number) for number in range(3)]
    states = StatePages([(0, layers[0]), (2, layers[1]), (0, layers[2])])
    tables = ((0, 3), (1, 2), (0, 5))
    assert states.shapes == ((torch.float32, (3, 3, 2)), (torch.float32, (3, 2, 3, 4)))
    assert states.nbytes == 3 * 30 * 4
    read = states.read(tables, 1)
    for kind in range(2):
        found = [layers[0][kind][3], layers[1][kind][5], layers[2][kind][3]]
        assert torch.equal(read[kind], torch.stack(found))
    expected = [one.clone() for one in read]
    elsewhere = ((0, 0, 4), (), (0, 0, 1))
    states.write(read, elsewhere, 2)
    for tensors in layers:
        for one in tensors:
            one[3] = one[5] = 0  # what was read is a copy
    for some, again in zip(expected, states.read(elsewhere, 2), strict=True):
        assert torch.equal(some, again)


def test_layers_may_have_states_of_different_shapes() -> None:
    short = [torch.zeros(PAGES, 2, 5)]
    states = StatePages([(1, layer(0)), (1, short), (1, layer(1, torch.bfloat16))])
    assert states.shapes == (
        (torch.float32, (2, 3, 2)),
        (torch.float32, (1, 2, 3, 4)),
        (torch.float32, (1, 2, 5)),
        (torch.bfloat16, (1, 2, 3, 4)),
    )


def test_quantised_states_are_refused() -> None:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        with pytest.raises(UnsupportedModelError, match="quantised"):
            StatePages([(0, [torch.zeros(PAGES, 4).to(dtype)])])


def test_a_layer_says_where_its_states_are() -> None:
    one, other = layer(0)
    for kept in ((one, other), [one, other], [[one, other]]):
        found = tensors_of(SimpleNamespace(kv_cache=kept))
        assert all(a is b for a, b in zip(found, (one, other), strict=True))
    with pytest.raises(UnsupportedModelError, match="none that KVBoost knows"):
        StatePages([(0, layer(0)), (0, tensors_of(object()))])
