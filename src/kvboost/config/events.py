"""Where KV events go."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass

from kvboost.config.validation import install_extra, whole
from kvboost.errors import ConfigError


@dataclass(frozen=True)
class KVEvents:
    """Where and how to publish KV events, in vLLM's format. They contain the tokens of prompts."""

    endpoint: str
    """A ZeroMQ address: ``tcp://*:5557`` listens; ``tcp://host:5557`` connects to a subscriber that
    listens; ``ipc://path`` stays on this machine."""
    topic: str = ""
    """The first frame of every message; llm-d expects ``kv@ADDRESS@MODEL``."""
    replay_endpoint: str | None = None
    """An address at which subscribers ask for messages that they have missed."""
    block_size: int = 16
    """Tokens in a block; the router must be set to the same number."""

    def __post_init__(self) -> None:
        for option in ("endpoint", "replay_endpoint"):
            address = getattr(self, option)
            if address is not None and not re.fullmatch(
                r"tcp://[^\s/]+:\d{1,5}|(ipc|inproc)://\S+", address
            ):
                raise ConfigError(
                    f"{option}={address!r} is not an address for KV events; write "
                    "tcp://*:5557, tcp://host:5557 or ipc://path"
                )
        whole(self.block_size, 1, "block_size")
        for name in ("zmq", "msgspec"):
            if importlib.util.find_spec(name) is None:
                raise ConfigError(f"KV events need {name}; {install_extra('events')}")
