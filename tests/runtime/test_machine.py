"""What differs between devices."""

from __future__ import annotations

import time

import pytest
import torch

from kvboost.config import EngineConfig
from kvboost.runtime.machine import Cpu, NvidiaGpu, machine_of


def test_on_cpus_other_programs_do_not_count() -> None:
    assert machine_of(torch.device("cpu")).clock is time.thread_time
    assert machine_of(torch.device("cuda")).clock is time.perf_counter
    assert machine_of(torch.device("mps")).clock is time.perf_counter


@pytest.mark.parametrize(
    "device, kind, max_running", [("cpu", Cpu, None), ("cuda:1", NvidiaGpu, 64)]
)
def test_a_device_decides_once(device: str, kind: type, max_running: int | None) -> None:
    machine = machine_of(torch.device(device))
    assert type(machine) is kind and machine.max_running == max_running
    assert machine.pauses == machine.packs_into_ram == (device == "cpu")


def test_other_gpus_have_no_far_rows() -> None:
    machine = machine_of(torch.device("mps"))
    refusal = machine.far_place(EngineConfig(), None, 0)  # type: ignore[arg-type]
    assert "not to 'mps'" in str(refusal) and not machine.may_page
