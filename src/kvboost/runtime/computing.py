"""How requests say which rows they need next."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import torch

from kvboost.model.sampling import Picked
from kvboost.model.segment import Segment

Result = TypeVar("Result")
Given = torch.Tensor | Picked
"""The logits of some rows, or the next token where rows have a sampler and it ran on the device."""
Computing = Generator[Segment | None, Given | None, Result]
"""Yields the rows it needs next and receives their logits, or the next token; returns a result.
``None`` instead of rows is a pause: it needs nothing, but text can be shown and other requests can
run."""
Steps = Computing[None]
"""A whole request."""
