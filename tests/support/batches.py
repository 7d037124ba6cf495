"""Prompts for many requests at once, and what they are compared with."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from kvboost import GenerationMode, KVBoost
from support.forwards import intercept
from support.tiny import DEVICE

TEXT = np.random.default_rng(0).integers(0, 250, 4000).tolist()
EXACT = GenerationMode.PREFIX_CACHE

on_buffers = pytest.mark.skipif(
    DEVICE != "cpu", reason="it watches forwards over buffers; a GPU has pages"
)


def alone(engine: KVBoost, prompt: list[int], *rest: Any, **options: Any) -> list[int]:
    return engine.generate(prompt, *rest, mode=GenerationMode.BASELINE, **options).token_ids


def slow_down(engine: KVBoost, monkeypatch: pytest.MonkeyPatch, seconds: float = 0.005) -> None:
    def slowly(run: Any, *given: Any) -> torch.Tensor:
        threading.Event().wait(seconds)
        return run(*given)

    intercept(engine, monkeypatch, slowly)
