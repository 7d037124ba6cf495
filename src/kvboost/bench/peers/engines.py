"""Engines that are measured behind a pipe, by name: which program, which environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvboost.bench.peers import llamacpp, vllm_cpu
from kvboost.bench.peers.base import (
    SETUP,
    SETUP_ALL,
    Setting,
    gguf_file,
    is_set_up,
    peer_python,
    peers_dir,
)

WORKERS = Path(__file__).parent / "workers"


@dataclass(frozen=True)
class Engine:
    """A program of ``workers/`` and the environment it runs in."""

    name: str
    script: Path
    environment: str | None = None
    """Its name in ``peers_dir()``; None is the package's own."""
    reads_gguf: bool = False
    options: Mapping[str, object] = field(default_factory=dict)
    """Told to it on top of what everyone is told."""

    def missing(self, setting: Setting) -> str | None:
        """Why it cannot run here and what to do about it; None if it can."""
        if self.environment is not None and not is_set_up(self.environment):
            return (
                f"not set up in {peers_dir() / self.environment}; run {SETUP_ALL}, "
                f"or {SETUP} {self.environment}"
            )
        if self.reads_gguf and not gguf_file(setting.model).is_file():
            return f"the weights of {setting.model!r} are not there as {gguf_file(setting.model)}"
        return None

    def command(self) -> list[str]:
        python = sys.executable if self.environment is None else str(peer_python(self.environment))
        return [python, str(WORKERS / "pipe.py"), str(self.script)]

    def variables(self, setting: Setting) -> dict[str, str]:
        """The whole environment of its process."""
        found = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setting.threads)}
        if self.environment is not None:
            # Packages named here, ours among them, would go before those of its environment.
            found.pop("PYTHONPATH", None)
        if self.environment == vllm_cpu.ENVIRONMENT:
            found |= vllm_cpu.VLLM().environment(setting)
            found["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, and no way between two
        return found

    def given(self, setting: Setting) -> dict[str, object]:
        """What it is told to load."""
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
OURS = "kvboost"
OURS_PREFIX = "kvboost-prefix"
OWN = (STOCK, OURS, OURS_PREFIX)
"""Those that need no environment but the package's own."""

_HERE = WORKERS / "kvboost_here.py"

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(STOCK, WORKERS / "stock.py"),
        Engine(OURS, _HERE, options={"mode": "chunk_kv_reuse"}),
        Engine(OURS_PREFIX, _HERE, options={"mode": "prefix_cache"}),
        Engine("kvboost-0.9.0", WORKERS / "kvboost_090.py", "kvboost-0.9.0"),
        Engine("vllm", WORKERS / "vllm_cpu.py", vllm_cpu.ENVIRONMENT),
        Engine(
            "llama.cpp",
            WORKERS / "llamacpp.py",
            llamacpp.ENVIRONMENT,
            reads_gguf=True,
            options={"least_reused": llamacpp.LEAST_REUSED},
        ),
        Engine("openvino", WORKERS / "openvino_gguf.py", "openvino-genai", reads_gguf=True),
    )
}
PEERS = tuple(name for name in ENGINES if name not in OWN)


def colours(names: Sequence[str], palette: Sequence[str], plain: str) -> dict[str, str]:
    """A colour each, the same in every picture: ``plain`` for stock transformers, the measure of
    all, and one of ``palette`` for each of the others."""
    others = [name for name in (*ENGINES, *names) if name != STOCK]
    known = {name: palette[at % len(palette)] for at, name in enumerate(dict.fromkeys(others))}
    return {name: plain if name == STOCK else known[name] for name in names}
