"""Engines that are measured over a pipe, by name: which program, which environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvboost.bench.kit.figures import COLOURS, INK
from kvboost.bench.peers.environments import (
    KVBOOST_090,
    LLAMA_CPP,
    OPENVINO,
    VLLM,
    gguf_file,
    peer_program,
    peer_python,
    why_missing,
)
from kvboost.bench.peers.servers import LEAST_REUSED, OURS, PREFIX, RIVAL, VLLMServer
from kvboost.bench.peers.setting import Setting

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Engine:
    """A program and the environment it runs in."""

    name: str
    script: Path | None = None
    """None: the program that ``make peers`` put into the environment."""
    environment: str | None = None
    """Its name in ``peers_dir()``; None is the package's own."""
    reads_gguf: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    """Told to it on top of what all engines are told."""

    def missing(self, setting: Setting) -> str | None:
        """Why it cannot run here and what to do about it; None if it can."""
        if self.environment is None:
            return None
        return why_missing(self.environment, setting.model if self.reads_gguf else None)

    def command(self) -> list[str]:
        if self.environment is None:
            return [sys.executable, str(WORKERS / "pipe.py"), str(self.script)]
        program = self.script or peer_program(self.environment)
        return [str(peer_python(self.environment)), str(WORKERS / "pipe.py"), str(program)]

    def variables(self, setting: Setting) -> dict[str, str]:
        """The whole environment of its process."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setting.threads)}
        if self.environment == VLLM:
            found |= VLLMServer().environment(setting)
            found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, and no way between two
        if self.environment is not None:
            # Packages named here, ours among them, would go before those of its environment.
            found.pop("PYTHONPATH", None)
        return found

    def given(self, setting: Setting) -> dict[str, object]:
        """The options of what it loads."""
        return {
            "folder": str(setting.folder),
            "gguf": str(gguf_file(setting.model)),
            "threads": setting.threads,
            "context": setting.context_length,
            "cache_bytes": setting.cache_bytes,
            "device": setting.device,
            "dtype": setting.dtype,
            **self.options,
        }


STOCK = "stock"
OWN = (STOCK, OURS, PREFIX)
"""Engines that need only the package's own environment."""

_HERE = WORKERS / "kvboost_here.py"
_REUSE = {"least_reused": LEAST_REUSED}

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(STOCK, WORKERS / "stock.py"),
        Engine(OURS, _HERE, options={"mode": "chunk_kv_reuse"}),
        Engine(PREFIX, _HERE, options={"mode": "prefix_cache"}),
        Engine("kvboost-0.9.0", environment=KVBOOST_090),
        Engine(RIVAL, environment=VLLM),
        Engine("llama.cpp", environment=LLAMA_CPP, reads_gguf=True, options=_REUSE),
        Engine("openvino", environment=OPENVINO, reads_gguf=True),
    )
}
PEERS = tuple(name for name in ENGINES if name not in OWN)


def colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name, the same in every picture; ink for stock transformers."""
    others = dict.fromkeys(name for name in (*ENGINES, *names) if name != STOCK)
    known = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(others)}
    return {name: INK if name == STOCK else known[name] for name in names}
