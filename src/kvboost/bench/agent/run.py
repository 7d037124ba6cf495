"""``kvboost bench agent``: an agent's turns, made up or recorded, server by server."""

from __future__ import annotations

from kvboost.bench.agent import made_up, replay
from kvboost.bench.agent.settings import Settings as Settings
from kvboost.bench.kit.benchmark import Bench, Report


def run(settings: Settings, bench: Bench) -> Report:
    if settings.trace is None:
        return made_up.run(settings, bench)
    return replay.run(settings, bench)
