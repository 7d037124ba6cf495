"""The options of an engine while it runs, and whether it may still be used."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from kvboost.config import EngineConfig, RepairParams
from kvboost.errors import KVBoostError
from kvboost.results import Calibration

log = logging.getLogger("kvboost")

LEAST_RAISED = 0.15
"""A ratio of 0 is raised to this."""


class Settings:
    """Options are fixed, except for how much of moved text is repaired: calibration and the audit
    change that."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @property
    def repair(self) -> RepairParams:
        return self.config.repair

    def use(self, found: Calibration) -> None:
        """Repairs as calibration has found it to be enough."""
        self.config = replace(self.config, recompute_ratio=found.ratio)

    def repair_more(self, mean_kl: float) -> None:
        """The audit found answers that were further than ``max_audit_kl`` from exact ones."""
        ratio = min(1.0, 2 * self.config.recompute_ratio or LEAST_RAISED)
        if ratio != self.config.recompute_ratio:
            log.warning(
                "answers over moved text had a mean KL of %.3f, more than max_audit_kl=%s: "
                "recompute_ratio is %.2f from now on",
                mean_kl,
                self.config.max_audit_kl,
                ratio,
            )
            self.config = replace(self.config, recompute_ratio=ratio)


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
