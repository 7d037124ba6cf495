"""The table of ``kvboost models MODEL``."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from kvboost.cli.models import _table
from kvboost.model.fit.bandwidths import Bandwidths
from kvboost.model.fit.fits import Fit, Machine


def test_options_stay_in_one_line_on_a_narrow_terminal() -> None:
    machine = Machine(24 << 30, 18 << 30, Bandwidths(ram=5.7e9, disk=0.8e9), torch.float32)
    found = [
        Fit("cpu", "float32", 7 << 30, "resident", 0, 110_189, 0.9, "weights='plain'"),
        Fit("cpu", "packed", 1 << 30, "resident", 0, 110_189, 5.2, "weights='packed'"),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(_table(found, machine))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "weights='plain'" in printed and "weights='packed'" in printed
    assert all(heading in printed for heading in ("KV tokens", "tokens/s", "resident"))
