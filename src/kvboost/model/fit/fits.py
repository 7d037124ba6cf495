"""The ways a model could run here: what fits where, and how fast at most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvboost.config import format_bytes
from kvboost.errors import ConfigError
from kvboost.model.fit.bandwidths import Bandwidths, bandwidths
from kvboost.model.fit.headers import ModelHeader, StoredTensor
from kvboost.model.loading.device import pick_dtype
from kvboost.model.loading.machine import available_bytes, memory_bytes
from kvboost.model.streaming.plan import DeviceBudget, LayerPlan, ModelSizes, make_plan

PACKED_BITS = 5 / 4.5
"""Packed weights of 4 bits take 5 with their scales; files take 4.5."""
FREE_SHARE = 0.9
"""Of the memory that is free, for a model and its requests."""
LEAST_KV_SHARE = 0.05
"""Of a GPU's free memory, which a model must leave to requests if it is not streamed."""
KV_SHARE = 0.25
"""Of a machine's memory, for the KV of running requests."""


@dataclass(frozen=True)
class Machine:
    """A device that a model could run on."""

    memory: int
    free: int
    rates: Bandwidths
    cpu_dtype: torch.dtype
    gpu: str | None = None
    gpu_free: int = 0
    gpu_dtype: torch.dtype = torch.bfloat16

    @classmethod
    def here(cls, *, again: bool = False) -> Machine:
        """This machine; ``again`` measures its bandwidths anew."""
        rates, memory, free = bandwidths(again=again), memory_bytes(), available_bytes()
        cpu_dtype = pick_dtype(None, torch.device("cpu"))
        if not torch.cuda.is_available():
            return cls(memory, free, rates, cpu_dtype)
        device = torch.device("cuda")
        return cls(
            memory,
            free,
            rates,
            cpu_dtype,
            torch.cuda.get_device_name(device),
            torch.cuda.mem_get_info(device)[0],
            pick_dtype(None, device),
        )


@dataclass(frozen=True)
class Fit:
    """One way to run a model."""

    device: str
    weights: str
    """``"packed"``, or the type of plain ones."""
    num_bytes: int
    how: str
    """``"resident"``, ``"streamed"``, ``"streamed from disk"`` or ``"too large"``."""
    streamed_layers: int = 0
    kv_tokens: int | None = None
    """Tokens whose KV fits, of all requests together; None if the header does not say."""
    tokens_per_s: float | None = None
    """The most that memory and bus allow for one request; None if it does not run."""
    options: str = ""
    """The options for ``from_pretrained``."""


def fits(header: ModelHeader, machine: Machine) -> list[Fit]:
    """The ways to run a model, the GPU's first."""
    forms = ["plain", *(["packed"] if header.is_quantized else [])]
    found = [_on_gpu(header, machine, form) for form in forms if machine.gpu is not None]
    on_cpu = forms if header.packs_on_cpu else ["plain"]
    return found + [_on_cpu(header, machine, form) for form in on_cpu]


def _size(tensors: Sequence[StoredTensor], form: str, dtype: torch.dtype) -> int:
    """The bytes that tensors take in memory."""
    if form == "packed":
        return int(sum(_packed_bytes(tensor) for tensor in tensors))
    return sum(tensor.numbers for tensor in tensors) * dtype.itemsize


def _packed_bytes(tensor: StoredTensor) -> float:
    return tensor.num_bytes * PACKED_BITS if tensor.packed_bytes is None else tensor.packed_bytes


def _form_name(form: str, dtype: torch.dtype) -> str:
    return form if form == "packed" else str(dtype).removeprefix("torch.")


def _read_bytes(header: ModelHeader, form: str, dtype: torch.dtype) -> int:
    """The weights that a step reads: all but an embedding of its own, of which it reads a row."""
    embedding = [] if header.embedding is None else [header.embedding]
    return _size(header.tensors, form, dtype) - _size(embedding, form, dtype)


def _tokens(header: ModelHeader, num_bytes: int, dtype: torch.dtype) -> int | None:
    if header.kv_numbers is None:
        return None
    return max(0, num_bytes) // (header.kv_numbers * dtype.itemsize)


def _on_cpu(header: ModelHeader, machine: Machine, form: str) -> Fit:
    dtype = machine.cpu_dtype
    size = _size(header.tensors, form, dtype)
    made = Fit("cpu", _form_name(form, dtype), size, "too large", options=f"weights={form!r}")
    left = int(machine.free * FREE_SHARE) - size
    if left <= 0:
        return made
    rate = machine.rates.ram / max(1, _read_bytes(header, form, dtype))
    kv_bytes = min(left, int(machine.memory * KV_SHARE))
    kv_tokens = _tokens(header, kv_bytes, dtype)
    return Fit("cpu", made.weights, size, "resident", 0, kv_tokens, rate, made.options)


def _on_gpu(header: ModelHeader, machine: Machine, form: str) -> Fit:
    dtype = machine.gpu_dtype
    size = _size(header.tensors, form, dtype)
    name = _form_name(form, dtype)
    budget = DeviceBudget(int(machine.gpu_free * FREE_SHARE))
    options = f"weights={form!r}"
    rates, left = machine.rates, budget.device_bytes - size
    if left >= LEAST_KV_SHARE * machine.gpu_free:
        rate = (rates.gpu or 0.0) / max(1, _read_bytes(header, form, dtype))
        kv_tokens = _tokens(header, left, dtype)
        return Fit("cuda", name, size, "resident", 0, kv_tokens, rate, options)
    per_layer = _size(header.in_layers, form, dtype) // max(1, header.layers)
    embedding = [] if header.embedding is None else [header.embedding]
    sizes = ModelSizes(
        (per_layer,) * header.layers,
        size - per_layer * header.layers,
        _size(embedding, form, dtype),
        per_row=0,
    )
    try:
        plan = make_plan(sizes, budget, int(machine.free * FREE_SHARE))
    except (ConfigError, ValueError):  # not even with all layers streamed, or layers unknown
        return Fit("cuda", name, size, "too large", options=options)
    kv_tokens = _tokens(header, plan.kv_bytes, dtype)
    options += f", device_memory={format_bytes(budget.device_bytes)!r}"
    how = "streamed from disk" if plan.on_disk else "streamed"
    rate = 1 / _pass_seconds(plan, per_layer, rates)
    return Fit("cuda", name, size, how, len(plan.streamed), kv_tokens, rate, options)


def _pass_seconds(plan: LayerPlan, per_layer: int, rates: Bandwidths) -> float:
    """The copies of a pass; reading from disk and sending to the GPU overlap."""
    sent = len(plan.streamed) * per_layer / (rates.bus or 1.0)
    read = len(plan.on_disk) * per_layer / (rates.disk or 1.0)
    return max(sent, read, 1e-9)
