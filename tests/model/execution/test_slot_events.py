"""The order of copies and computation, written down by streams that do nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kvboost.model.far.costs import FarCosts
from kvboost.model.far.slots import CudaTransfers
from kvboost.model.streaming.slots import CudaSlots

CPU = torch.device("cpu")


class Event:
    def __init__(self, log: list[str], enable_timing: bool = False) -> None:
        self._log, self._is_timed = log, enable_timing
        self.name = f"event {sum(line.startswith('made') for line in log)}"
        log.append(f"made {self.name}")

    def record(self, stream: Stream) -> None:
        self._log.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        assert self._is_timed and end._is_timed
        return 1.0


class Stream:
    def __init__(self, log: list[str], name: str) -> None:
        self._log, self.name = log, name

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for {event.name}")

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch) -> list[str]:
    lines: list[str] = []
    computing = Stream(lines, "computing")
    fake = SimpleNamespace(
        Stream=lambda device: Stream(lines, "copies"),
        Event=lambda enable_timing=False: Event(lines, enable_timing),
        current_stream=lambda device: computing,
        stream=lambda stream: nullcontext(),
    )
    for name, value in vars(fake).items():
        monkeypatch.setattr(torch.cuda, name, value)
    return lines


def test_a_layers_slot_is_filled_after_its_use_and_used_after_it_is_filled(log) -> None:
    slots = CudaSlots(1, 8, CPU)
    assert log[0] == "copies waits for computing"
    del log[:]
    slots.fill(0, torch.arange(4, dtype=torch.uint8))
    slots.wait(0)
    slots.release(0)
    assert log == [
        "copies waits for event 1",
        "copies records event 0",
        "computing waits for event 0",
        "computing records event 1",
    ]
    assert slots.buffers[0, :4].tolist() == [0, 1, 2, 3]


def test_a_load_of_far_rows_waits_for_their_use_before_it_is_timed(log) -> None:
    costs = FarCosts()
    transfers = CudaTransfers(CPU, costs)
    del log[:]
    source, target = torch.ones(1, 2, 1, 4, 8), torch.zeros(1, 2, 1, 4, 8)
    transfers.load(1, source, target)
    transfers.wait(1)
    transfers.release(1)
    assert log == [
        "copies waits for event 3",  # two slots were filled, events 0 and 1; used, 2 and 3
        "copies records event 5",
        "copies records event 1",
        "computing waits for event 1",
        "computing records event 3",
    ]
    assert torch.equal(source, target) and costs.stream() is None
    transfers.load(1, source, target)
    assert costs.stream() == pytest.approx(1e-3 / target.nbytes)
