"""Answers that are known beforehand, from a model with random weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def scripted(model: nn.Module, tokens: Sequence[int]) -> Iterator[None]:
    """The model computes all that it would compute, and then says that the token at each position
    of the only request is followed by the next of ``tokens``, which are the prompt and the
    answer. Drafts of the answer are accepted or refused as if the model had thought of it."""
    script: torch.Tensor | None = None

    def say(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        nonlocal script
        logits, positions = output.logits[0], kwargs["position_ids"].reshape(-1)
        if script is None:
            script = torch.tensor([*tokens, tokens[-1]], device=logits.device)
        wanted = kwargs.get("logits_to_keep", 0)
        positions = positions[wanted if isinstance(wanted, torch.Tensor) else slice(-wanted, None)]
        following = script[(positions + 1).clamp(max=len(script) - 1)]
        logits.zero_().scatter_(1, following[:, None], 1.0)

    handle = model.register_forward_hook(say, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
