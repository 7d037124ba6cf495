"""What a layer of vLLM gives to our attention and hooks. vLLM itself is not needed."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, Mock

import pytest
import torch

from kvboost.model.execution.segment import Rules

NAME = "kvboost.integrations.vllm.sparse"
VLLM = ("config", "forward_context", "logger", "v1", "v1.attention", "v1.attention.backend")


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setitem(sys.modules, "vllm", MagicMock())
    for name in VLLM:
        monkeypatch.setitem(sys.modules, f"vllm.{name}", MagicMock())
    monkeypatch.setitem(sys.modules, NAME, ModuleType(NAME))  # so that it is taken away again
    monkeypatch.delitem(sys.modules, NAME)
    return importlib.import_module(NAME)


@pytest.mark.parametrize("sinks", [None, torch.arange(2.0)])
@pytest.mark.parametrize(("softcap", "window"), [(None, None), (0, 64), (30.0, None)])
def test_attention_and_hooks_get_the_rules_of_the_layer(
    sparse: ModuleType, sinks: torch.Tensor | None, softcap: float | None, window: int | None
) -> None:
    impl = SimpleNamespace(do_kv_cache_update=Mock(), forward=Mock(), scale=0.5, sinks=sinks)
    if sinks is None:
        del impl.sinks  # as in versions that know none
    if softcap is not None:
        impl.logits_soft_cap = softcap
    hook, attention = Mock(), Mock()
    sparse._observe(SimpleNamespace(impl=impl, sliding_window=window), 3, hook, attention)
    query, out = torch.zeros(4, 2, 8), torch.zeros(4, 16)
    impl.forward(None, query, query, query, None, None, output=out)
    expected = Rules(0.5, window, softcap or None, sinks)
    hook.on_query.assert_called_once_with(3, query, expected)
    (number, given, rules, into), _ = attention.call_args
    assert (number, rules) == (3, expected)
    assert given is query and into.shape == query.shape
