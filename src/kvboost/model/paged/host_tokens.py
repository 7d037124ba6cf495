"""Tokens that the device has picked, on their way to the host."""

from __future__ import annotations

import torch


class HostTokens:
    """A copy that starts at once; reading a token waits for it."""

    def __init__(self, picked: torch.Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if picked.device.type == "cuda":
            self._host = torch.empty(picked.shape, dtype=picked.dtype, pin_memory=True)
            self._host.copy_(picked, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._host = picked.clone()
        self._list: list[int] | None = None

    def __getitem__(self, index: int) -> int:
        if self._list is None:
            if self._copied is not None:
                self._copied.synchronize()
            self._list = self._host.tolist()
        return self._list[index]
