"""Selective scans (Mamba 1) that go on from a state.

transformers' scan of several rows begins with zeros, whatever came before. What it lacks is linear
in the state: the state fades at each row as all states do, and is added to what the scan gives.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from kvboost.errors import UnsupportedModelError

SCAN = "mamba_selective_scan"
"""The name of the scan in a model's module."""


class _Begins(threading.local):
    """The states that the next scans of a thread begin with, one for each."""

    states: tuple[torch.Tensor, ...] = ()


_begins = _Begins()


def scans(model: PreTrainedModel) -> bool:
    """Whether a model computes its rows with such scans. From then on those of this kind of model
    go on from the states that :func:`begin_with` sets, in the thread that does."""
    module = sys.modules[type(model).__module__]
    scan = getattr(module, SCAN, None)
    if scan is None:
        return False
    if not isinstance(scan, _Scan):
        setattr(module, SCAN, _Scan(scan))
    return True


def begin_with(state: torch.Tensor | None) -> None:
    """The next scans of this thread begin with ``state``, ``[1, channels, size]``, or with that of
    each head, ``[1, heads, channels, size]``."""
    if state is None:
        _begins.states = ()
    else:
        _begins.states = (state,) if state.dim() == 3 else state.unbind(1)


@contextmanager
def scanning() -> Iterator[None]:
    """No state is left to other forwards of this thread."""
    try:
        yield
    finally:
        begin_with(None)


class _Scan:
    """``scan`` with a state to begin with."""

    def __init__(self, scan: Callable[..., Any]) -> None:
        self._scan = scan

    def __call__(
        self,
        rows: torch.Tensor,
        steps: torch.Tensor,
        A: torch.Tensor,  # as in transformers
        B: torch.Tensor,
        C: torch.Tensor,
        **options: Any,
    ) -> Any:
        """``rows`` and ``steps`` are ``[1, channels, rows]``, ``A`` is ``[channels, size]``, ``B``
        and ``C`` are ``[1, size, rows]``."""
        found = self._scan(rows, steps, A, B, C, **options)
        if not _begins.states:
            return found
        begin, *rest = _begins.states
        _begins.states = tuple(rest)
        if not options.get("return_last_state"):
            raise UnsupportedModelError("a scan that gives no state cannot go on from one")
        given, last = found
        bias, gate = options.get("delta_bias"), options.get("z")
        steps = steps if bias is None else steps + bias.to(steps.dtype)[..., None]
        steps = functional.softplus(steps) if options.get("delta_softplus") else steps
        # [1, channels, rows, size]
        faded = torch.exp(steps.float().cumsum(2)[..., None] * A[None, :, None])
        faded *= begin[:, :, None]
        more = torch.einsum("bcrn,bnr->bcr", faded, C.float())
        more = more if gate is None else more * functional.silu(gate.float())
        return given + more.to(given.dtype), last + faded[:, :, -1].to(last.dtype)
