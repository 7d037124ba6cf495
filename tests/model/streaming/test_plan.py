"""What fits stays on the device, spread evenly, and the budget holds everything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.model.loading.load import wrap
from kvboost.model.streaming.place import place
from kvboost.model.streaming.plan import (
    NUM_SLOTS,
    OTHER_BYTES,
    DeviceBudget,
    ModelSizes,
    make_plan,
    spread,
)
from support.late_slots import LateSlots
from support.tiny import DEVICE, byte_tokenizer, make_engine, tiny_model

GIB = 1 << 30
NUM_PARAMETERS = 756_864
OF_32B = ModelSizes((259 << 20,) * 64, 3 * GIB, 3 * GIB // 2, 200_000, 280 << 20)


@given(
    st.lists(st.integers(1, 4).map(lambda size: size << 20), min_size=1, max_size=40),
    st.integers(100, 400).map(lambda size: size << 20),
    st.integers(0, 200).map(lambda size: size << 20),
)
def test_a_plan_never_exceeds_its_budgets(layers: list[int], total: int, host: int) -> None:
    sizes = ModelSizes(tuple(layers), 1 << 20, 0, 100)
    try:
        plan = make_plan(sizes, DeviceBudget(total), host)
    except ConfigError as error:
        assert "is too little" in str(error)
        return
    assert plan.resident | plan.in_memory | plan.on_disk == set(range(len(layers)))
    assert len(plan.resident) + len(plan.in_memory) + len(plan.on_disk) == len(layers)
    ring = NUM_SLOTS * max(layers) if plan.streamed else 0
    resident = sum(layers[number] for number in plan.resident)
    used = sizes.others + resident + ring + plan.kv_bytes + OTHER_BYTES
    assert used + plan.most_rows * sizes.per_row <= total
    assert sum(layers[number] for number in plan.in_memory) <= host


def test_a_32b_model_in_8_gib_keeps_some_layers_and_streams_the_others_between_them() -> None:
    plan = make_plan(OF_32B, DeviceBudget(8 * GIB), 100 * GIB)
    assert len(plan.resident) == 16 and not plan.on_disk and plan.kv_bytes == GIB
    resident = sorted(plan.resident)
    gaps = {after - before for before, after in itertools.pairwise(resident)}
    assert gaps == {4}
    assert plan.most_rows == 2560
    few = make_plan(OF_32B, DeviceBudget(8 * GIB, kv_bytes=GIB // 4), 5 * GIB)
    assert len(few.resident) == 19 and len(few.in_memory) == 19 and len(few.on_disk) == 26


def test_what_fits_is_not_streamed() -> None:
    plan = make_plan(OF_32B, DeviceBudget(30 * GIB), 0)
    assert len(plan.resident) == 64 and not plan.streamed
    assert plan.kv_bytes > 7 * GIB, "requests have what is left"


def test_too_small_a_budget_is_refused_with_its_parts() -> None:
    with pytest.raises(ConfigError, match=r"2.5GiB is too little.*needs 2.8GiB: 1.5GiB for w"):
        make_plan(OF_32B, DeviceBudget(5 * GIB // 2), 0)


@given(st.integers(0, 30), st.integers(1, 30))
def test_spread_numbers_are_distinct_and_in_range(count: int, number: int) -> None:
    found = spread(min(count, number), number)
    assert len(set(found)) == len(found) == min(count, number)
    assert all(0 <= one < number for one in found)


def engine_in(megabytes: int, monkeypatch: pytest.MonkeyPatch) -> KVBoost:
    monkeypatch.setattr("kvboost.model.streaming.plan.OTHER_BYTES", 0)
    config = EngineConfig(device_memory=f"{megabytes}MB", chunk_size=16, speculate="off")
    budget = DeviceBudget.of(config)
    assert budget is not None
    model = tiny_model("llama", num_hidden_layers=8, hidden_size=128)
    device = torch.device(DEVICE)
    loaded = wrap(
        model,
        byte_tokenizer(),
        move=lambda model: place(model, device, budget, make_slots=LateSlots),
    )
    return KVBoost(loaded, config)


def test_a_budget_decides_how_many_layers_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding of this model is not its head, so it stays on the host, too."""

    def answer(engine: KVBoost) -> Any:
        result = engine.generate("hello", 4, ignore_eos=True)
        assert engine.facts()["parameters"] == NUM_PARAMETERS
        return result.token_ids, engine.facts()["streamed_layers"]

    with make_engine(tiny_model("llama", num_hidden_layers=8, hidden_size=128)) as engine:
        expected, none = answer(engine)
    with engine_in(3, monkeypatch) as engine:
        found, some = answer(engine)
        note = engine.model.placement.note
    with engine_in(40, monkeypatch) as engine:
        same, fit = answer(engine)
        assert engine.model.placement.note is None
    assert expected == found == same
    assert none == fit == 0 < some < 8
    assert f"{some} of 8 layers are streamed" in note


def test_device_memory_is_for_gpus() -> None:
    with pytest.raises(ConfigError, match="a budget for an NVIDIA GPU, and the model runs on cpu"):
        KVBoost.from_pretrained("smollm2-135m", device="cpu", device_memory="1GiB")
    with pytest.raises(ConfigError, match="use from_pretrained"):
        make_engine(tiny_model("llama"), device_memory="1GiB")
    with pytest.raises(ConfigError, match="leave out tp_size"):
        KVBoost.from_pretrained("smollm2-135m", tp_size=2, device_memory="1GiB")
    with pytest.raises(ConfigError, match="set that too"):
        EngineConfig(host_memory="1GiB")
