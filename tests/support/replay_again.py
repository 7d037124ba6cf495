"""What stands in for CUDA graphs on CPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch


class ReplayAgain:
    """A capture runs the function as a real one does, and a replay is the function called again.
    Notes what was captured; does not capture what is ``refused``."""

    note = None
    has_room = True

    def __init__(self, refused: str = "") -> None:
        self.refused = refused
        self.captured: list[Callable[[], torch.Tensor]] = []
        self.names: list[str] = []
        self.replays = 0

    @property
    def num_graphs(self) -> int:
        return len(self.captured)

    def __call__(
        self, function: Callable[[], torch.Tensor], name: str
    ) -> Callable[[], torch.Tensor]:
        if name == self.refused:
            return function
        function()
        function()
        self.captured.append(function)
        self.names.append(name)

        def replay() -> torch.Tensor:
            self.replays += 1
            return function()

        return replay
