"""llama.cpp's server, from the package xllamacpp, on the GGUF file the model comes from."""

from __future__ import annotations

import json

from kvboost.bench.peers.base import (
    SETUP,
    Setting,
    gguf_file,
    installed_version,
    is_set_up,
    peer_python,
    peers_dir,
)

ENVIRONMENT = "xllamacpp"
LEAST_REUSED = 32
"""``--cache-reuse``: runs of this many tokens are moved in place rather than computed."""

PROGRAM = """
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


class LlamaCpp:
    """As many slots as there are users; each keeps its last prompt, older ones stay in RAM."""

    name = "llama.cpp"
    ready_path = "/health"

    def missing(self, setting: Setting) -> str | None:
        if not is_set_up(ENVIRONMENT):
            return f"not set up in {peers_dir() / ENVIRONMENT}; run {SETUP} {ENVIRONMENT}"
        if not gguf_file(setting.model).is_file():
            return f"the weights of {setting.model!r} are not there as {gguf_file(setting.model)}"
        return None

    def version(self) -> str:
        return f"xllamacpp {installed_version(ENVIRONMENT, 'xllamacpp')}"

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
        return [str(peer_python(ENVIRONMENT)), "-c", PROGRAM, json.dumps(given)]

    def environment(self, setting: Setting) -> dict[str, str]:
        return {}

    def settings(self, setting: Setting) -> dict[str, object]:
        return {
            "weights": "as in the GGUF file (Q4_1 of the bundled model)",
            "threads": setting.threads,
            "context": setting.context_length,
            "slots": setting.users,
            "reuse": f"cache_prompt, cache_reuse {LEAST_REUSED}, "
            f"{setting.cache_bytes // 1024**2} MiB of older prompts",
        }
