"""How long an engine may be used."""

from __future__ import annotations

import os

from kvboost.errors import KVBoostError


class Lifetime:
    """From the making of an engine to its end, in the process that made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.is_over = False

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the one that the engine belongs to."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises KVBoostError if the engine can be used no more, or not here."""
        if self.is_over:
            raise KVBoostError("this engine is closed; make another one")
        if self.is_elsewhere:
            raise KVBoostError(
                f"this engine belongs to process {self._pid}, and process {os.getpid()} is a fork "
                "of it: threads and locks do not survive a fork; make the engine in the child"
            )
