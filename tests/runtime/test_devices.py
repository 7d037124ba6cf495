"""What differs between devices."""

from __future__ import annotations

import time

import pytest
import torch

from kvboost.config import EngineConfig
from kvboost.runtime.devices import Cpu, NvidiaGpu, device_of


def test_on_cpus_other_programs_do_not_count() -> None:
    assert device_of(torch.device("cpu")).clock is time.thread_time
    assert device_of(torch.device("cuda")).clock is time.perf_counter
    assert device_of(torch.device("mps")).clock is time.perf_counter


@pytest.mark.parametrize(
    "name, kind, usual", [("cpu", Cpu, (None, None)), ("cuda:1", NvidiaGpu, (64, 512))]
)
def test_a_device_decides_once(name: str, kind: type, usual: tuple[int | None, int | None]) -> None:
    device = device_of(torch.device(name))
    assert type(device) is kind and (device.max_running, device.chunk_size) == usual
    assert device.is_host == (name == "cpu")


def test_other_gpus_have_no_far_rows() -> None:
    device = device_of(torch.device("mps"))
    refusal = device.far_place(EngineConfig(), None, 0)  # type: ignore[arg-type]
    assert "not to 'mps'" in str(refusal) and not device.may_page
