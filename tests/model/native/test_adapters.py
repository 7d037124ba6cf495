"""Adapters in whole layers of ours, against hooks on the model's own linear layers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvboost.model.adapters.adapter import Adapter, AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.adapters.layers import AdaptedRows
from kvboost.model.execution.fast_layers import can_pack, pack_layers
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Segment
from kvboost.model.native.adapters import halved
from kvboost.model.native.decoder import restore_forward
from support.adapters import LINEARS, write_adapter
from support.kernel_forms import CPU, SIZES, close, each_dtype

LENGTHS = (1, 5, 7, 60)
"""One row, some, and more than are multiplied at once."""
STEP = (1,) * 6


def segments(
    forward: Forward, adapters: Sequence[Adapter | None], hooked: bool, lengths: Sequence[int]
) -> list[Segment]:
    made = []
    for number, (adapter, rows) in enumerate(zip(adapters, lengths, strict=True)):
        kv = RequestKV(forward.shape, 64)
        start = min(number, rows - 1)
        kv.adapter = None if adapter is None else AppliedAdapter(adapter, start)
        ids = torch.randint(0, 128, (rows,), generator=torch.Generator().manual_seed(number))
        hook = Hook() if hooked else None  # with which a layer is two calls
        made.append(Segment(kv, ids, range(rows), num_logits=rows, hook=hook))
    return made


@each_dtype
@pytest.mark.parametrize(("hooked", "lengths"), [(False, LENGTHS), (True, LENGTHS), (False, STEP)])
def test_whole_layers_take_adapters(
    dtype: torch.dtype,
    hooked: bool,
    lengths: Sequence[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
    if dtype == torch.float32:
        config.intermediate_size = 1056  # more columns than are added up at a time
    model = LlamaForCausalLM(config).to(dtype).eval()
    assert can_pack(CPU, dtype)
    forward = Forward(model, packed=True, fast_layers=pack_layers(model))
    everywhere, few = (
        forward.load_adapter(
            read_adapter(
                write_adapter(tmp_path / name, model, targets=targets, rank=rank, dtype=saved)
            )
        )
        for name, targets, rank, saved in (
            ("a", LINEARS, 5, torch.float32),
            ("b", ("k_proj", "up_proj"), 20, torch.bfloat16),
        )
    )
    assert all(halved(delta) is None for delta in everywhere.deltas.values())
    is_wide = dtype == torch.float32  # and then its weights are read as the file has them
    assert all((halved(delta) is not None) == is_wide for delta in few.deltas.values())
    order = [everywhere, None, few, everywhere, few, everywhere][: len(lengths)]
    calls: list[str] = []
    add = AdaptedRows.add

    def counted(self: AdaptedRows, module: str, *rows: torch.Tensor) -> None:
        calls.append(module)
        add(self, module, *rows)

    monkeypatch.setattr(AdaptedRows, "add", counted)
    given = forward(segments(forward, order, hooked, lengths))
    assert not calls
    for layer in model.model.layers:
        restore_forward(layer)
    expected = forward(segments(forward, order, hooked, lengths))
    assert len(calls) == 7 * SIZES["num_hidden_layers"]
    assert close(given, expected, 4)
    plain = forward(segments(forward, [None] * len(order), hooked, lengths))
    assert not torch.allclose(given, plain, atol=0.1)


def test_what_kernels_write_to_outlives_a_larger_forward_in_between(tmp_path: Path) -> None:
    """Answers may run between two layers of a prompt's forward."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    forward = Forward(model, packed=True, fast_layers=pack_layers(model))
    adapter = forward.load_adapter(read_adapter(write_adapter(tmp_path / "a", model)))
    kept = forward._kernels._kept
    held: list[bool] = []

    def run_a_larger_one() -> None:
        if "sums" in kept and not held:
            memory = [weakref.ref(kept[name]) for name in ("sums", "wide")]
            forward.between_parts = None
            forward(segments(forward, [adapter], hooked=False, lengths=[60]))
            held.extend(
                one() is not None and one() is not kept[name]
                for one, name in zip(memory, ("sums", "wide"), strict=True)
            )

    forward.between_parts = run_a_larger_one
    forward(segments(forward, [adapter], hooked=False, lengths=[5]))
    assert held == [True, True]
