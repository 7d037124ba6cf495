"""Engines whose requests have pages on any device: on a CPU, torch runs the most used kernels,
Triton's interpreter the others, and a decode step is the captured function called again."""

from __future__ import annotations

from typing import Any

import pytest

from kvboost import KVBoost
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import Slab
from kvboost.model.paged.steps import Steps
from kvboost.runtime.paged_backend import PagedBackend
from support.tiny import DEVICE, OTHER_MODELS, make_engine, tiny_model
from support.torch_kernels import use_torch_kernels

SMALL = {"num_hidden_layers": 1}
"""The interpreter takes its time for every layer."""
TWO_LAYERS = {"num_hidden_layers": 2}
"""For what differs between layers: windows, and what a hook sees."""

MEMORY = 1 << 26
"""For pages: more than these tests need."""
SMALL_FORWARDS = (32, 64)
"""Forwards with buffers of fixed size: the interpreter also takes its time for padding."""


def paged_engine(
    monkeypatch: pytest.MonkeyPatch,
    name: str = "llama",
    *,
    pages: bool = True,
    sizes: dict[str, int] = SMALL,
    interpreted: bool = False,
    **config: Any,
) -> KVBoost:
    """An engine with pages, or one without. ``interpreted`` runs all kernels themselves, also on a
    CPU."""
    use_pages(monkeypatch, pages=pages, interpreted=interpreted)
    config = {"max_kv_bytes": MEMORY, **config}
    return make_engine(tiny_model(name, **sizes), strict=name not in OTHER_MODELS, **config)


def use_pages(
    monkeypatch: pytest.MonkeyPatch, *, pages: bool = True, interpreted: bool = False
) -> None:
    """The same for engines that a test makes."""
    reason = "" if pages else "this test compares with buffers"
    monkeypatch.setattr("kvboost.runtime.runtime.why_buffers", lambda *_: reason)
    monkeypatch.setattr("kvboost.reuse.paged.forwards.SIZES", SMALL_FORWARDS)
    monkeypatch.setattr("kvboost.reuse.paged.beside.ROWS", SMALL_FORWARDS[0])
    monkeypatch.setattr("kvboost.reuse.paged.graphs.MOST_SPANS", 4)
    if DEVICE == "cpu" and not interpreted:
        use_torch_kernels(monkeypatch)
    for module in ("kvboost.reuse.repair", "kvboost.reuse.paged.forwards"):
        monkeypatch.setattr(f"{module}.PROBE_ROWS", SMALL_FORWARDS[0])


def paged_kv(slab: Slab, num_rows: int) -> PagedKV:
    """The KV of a request with pages for so many rows."""
    holding = slab.take(num_rows)
    assert holding is not None
    return PagedKV(slab, holding)


def forward_of(engine: KVBoost) -> PagedForward:
    """What runs rows in pages; it is made with the first request, or now."""
    backend = engine.runtime.backend
    assert isinstance(backend, PagedBackend)
    backend.pool.prepare()
    assert isinstance(backend.forward, PagedForward)
    return backend.forward


def steps_of(engine: KVBoost) -> Steps:
    return forward_of(engine).steps


def leaks(engine: KVBoost) -> list[str]:
    return forward_of(engine).slab.check_integrity()
