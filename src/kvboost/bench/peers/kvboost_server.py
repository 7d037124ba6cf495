"""Our own server, with reuse and without."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec

from kvboost.bench.peers.base import Setting

LEAST_RUNNING = 16
"""Its own default."""


class KVBoostServer:
    def __init__(self, name: str, mode: str, *options: str) -> None:
        """``options`` are added to those of ``kvboost serve``."""
        self.name = name
        self.mode = mode
        self._options = options

    ready_path = "/ready"

    def missing(self, setting: Setting) -> str | None:
        if find_spec("fastapi") is None or find_spec("uvicorn") is None:
            return "the server's packages are missing; run pip install 'kvboost[serve]'"
        return None

    def version(self) -> str:
        return f"kvboost {version('kvboost')}"

    def command(self, setting: Setting, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "kvboost", "serve", "--model", setting.model),
            *("--host", "127.0.0.1", "--port", str(port), "--mode", self.mode),
            *("--device", "cpu", "--dtype", "bfloat16"),
            *("--max-cache-bytes", str(setting.cache_bytes)),
            *("--max-running", str(max(LEAST_RUNNING, setting.users))),
            *self._options,
        ]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {
            "OMP_NUM_THREADS": str(setting.threads),
            "KVBOOST_CACHE_DIR": "",  # nothing of an earlier run, and no keys
            "KVBOOST_API_KEYS": "",
        }

    def settings(self, setting: Setting) -> dict[str, object]:
        return {
            "weights": "bfloat16",
            "threads": setting.threads,
            "context": setting.context_length,
            "kv_gib": setting.cache_bytes / 1024**3,
            "reuse": self.mode,
        }
