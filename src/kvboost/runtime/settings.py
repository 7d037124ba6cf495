"""The options of an engine while it runs."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvboost.config import EngineConfig, RepairParams
from kvboost.results import Calibration
from kvboost.reuse.cost import CostModel

log = logging.getLogger("kvboost")

LEAST_RAISED = 0.15
"""What a ratio of 0 is raised to."""


class Settings:
    """Options are fixed, except for how much of moved text is repaired: calibration and the audit
    change that. ``cost`` keeps the tolerance that was found for later processes."""

    def __init__(self, config: EngineConfig, cost: CostModel) -> None:
        if config.recompute_tolerance is None:
            config = replace(config, recompute_tolerance=cost.tolerance)
        self.config = config
        self._cost = cost

    @property
    def repair(self) -> RepairParams:
        return self.config.repair

    def use(self, found: Calibration) -> None:
        """Repairs as calibration has found it to be enough."""
        self.config = replace(self.config, recompute_ratio=found.ratio)
        if found.tolerance is not None:
            self.config = replace(self.config, recompute_tolerance=found.tolerance)
            self._cost.tolerance = found.tolerance
            self._cost.save()

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
