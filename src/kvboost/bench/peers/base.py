"""What the same for all engines is, where their environments are, and what a server is to us: how
it starts, when it is ready, what it says of itself."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kvboost.config import home
from kvboost.errors import KVBoostError

SETUP = "python scripts/setup_peers.py"
SETUP_ALL = "make peers"
READY = ".ready"
"""In an environment that was built to its end; holds the list it was built from."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all servers of a run."""

    model: str
    folder: Path
    """The model's weights as transformers keeps them."""
    users: int
    threads: int
    context_length: int
    cache_bytes: int = 2 * 1024**3
    """For KV that may come back."""
    device: str = "cpu"
    """Of ours and of stock transformers; the others are for CPUs."""
    dtype: str = "bfloat16"


class Peer(Protocol):
    """A server with OpenAI's HTTP interface."""

    name: str
    ready_path: str
    """Answers 200 once requests are taken."""

    def missing(self, setting: Setting) -> str | None:
        """Why it cannot run here and what to do about it; None if it can."""

    def version(self) -> str: ...

    def command(self, setting: Setting, port: int) -> list[str]:
        """Starts it on this machine at ``port``; ends when its process does."""

    def environment(self, setting: Setting) -> dict[str, str]:
        """Added to the environment."""

    def settings(self, setting: Setting) -> dict[str, object]:
        """What its numbers depend on, for the report."""


def peers_dir() -> Path:
    """Where ``scripts/setup_peers.py`` puts other people's engines, one environment each."""
    return home() / "peers"


def peer_python(name: str) -> Path:
    """The Python of the environment called ``name``."""
    return peers_dir() / name / "bin" / "python"


def is_set_up(name: str) -> bool:
    return (peers_dir() / name / READY).is_file()


def gguf_file(model: str) -> Path:
    """The file llama.cpp and OpenVINO read, if the model's weights come as one."""
    return peers_dir() / "gguf" / f"{Path(model).name}.gguf"


def installed_version(name: str, package: str) -> str:
    """The version of ``package`` in the environment called ``name``; imports nothing of it."""
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run(
        [str(peer_python(name)), "-c", program, package], capture_output=True, text=True
    )
    if done.returncode:
        raise KVBoostError(
            f"{package} is not in {peers_dir() / name}; remove that folder and run {SETUP}"
        )
    return done.stdout.strip()
