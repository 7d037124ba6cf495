"""What differs between devices."""

from __future__ import annotations

import torch

from kvboost.config import EngineConfig
from kvboost.runtime.devices import device_of


def test_other_gpus_have_no_far_rows() -> None:
    device = device_of(torch.device("mps"))
    refusal = device.far_place(EngineConfig(), None, 0)  # type: ignore[arg-type]
    assert "not to 'mps'" in str(refusal) and device.gpu is None
