"""What all routes share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.serve.auth import Keys
from kvboost.serve.errors import ApiError
from kvboost.serve.live import LiveLog
from kvboost.serve.metrics import Metrics
from kvboost.serve.settings import ServerSettings

if TYPE_CHECKING:
    from kvboost import KVBoost


class ServerState:
    """One engine on the network."""

    def __init__(self, engine: KVBoost, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.keys = Keys(settings)
        self.metrics = Metrics(engine)
        self.live = LiveLog()
        self.started = time.time()
        self.draining = False
        self.names = served_names(engine, settings)

    def check_model(self, name: str) -> None:
        """Raises ApiError 404 if ``name`` is not what the model is called here."""
        if name not in self.names:
            there = ", ".join(self.names)
            raise ApiError(
                404,
                f"there is no model {name[:80]!r} here; there is {there}",
                code="model_not_found",
                param="model",
            )

    def strategy(self, chosen: str | None) -> str:
        return chosen or self.engine.config.recompute_strategy


def served_names(engine: KVBoost, settings: ServerSettings) -> tuple[str, ...]:
    """What requests may call the model, the first being what we call it."""
    return settings.served_names or (_plain_name(engine.model_name),)


def _plain_name(name: str) -> str:
    """Of a path its end: where a model lies is nobody's business."""
    is_path = name.startswith((".", "/", "~")) or "\\" in name or Path(name).exists()
    return Path(name).name.removesuffix(".gguf") or "model" if is_path else name
