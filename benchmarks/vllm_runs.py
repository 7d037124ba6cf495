"""Runs of ``vllm_connector.py`` in an environment that has vLLM."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from kvboost.bench.peers.environments import (
    VLLM,
    installed_version,
    package_path,
    peer_python,
    why_missing,
)
from kvboost.bench.peers.process import Process, sigterm_as_exit
from kvboost.bench.peers.servers import VLLMServer
from kvboost.bench.peers.setting import prepare
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import KVBoostError
from kvboost.integrations.vllm.environment import installed

WORKER = "benchmarks.vllm_connector"


@dataclass(frozen=True)
class Place:
    """Where vLLM runs."""

    python: str
    version: str
    device: str
    model: Path | None = None
    """A model's folder; None for random weights."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment."""

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


def find_place() -> Place:
    """This interpreter if it has vLLM, else the environment that ``make peers`` makes. Raises
    ``KVBoostError`` if neither is there."""
    if find_spec("vllm") is not None:
        version = " ".join(installed())
        if torch.cuda.is_available():
            return Place(sys.executable, version, "cuda")
        return _on_cpu(sys.executable, version)
    if (reason := why_missing(VLLM)) is not None:
        raise KVBoostError(
            "there is no vLLM: run this in an environment that has it (kvboost doctor --vllm), or "
            f"set up vLLM for CPUs ({reason})"
        )
    python = str(peer_python(VLLM))
    return _on_cpu(python, f"{VLLM} {installed_version(python, VLLM)}")


def _on_cpu(python: str, version: str) -> Place:
    setting, _ = prepare(DEFAULT_MODEL)
    variables = VLLMServer().environment(setting) | {"OMP_NUM_THREADS": str(setting.threads)}
    return Place(python, version, "cpu", setting.folder, variables)


def run_worker(place: Place, options: Sequence[str]) -> dict[str, Any]:
    """The worker's report, its last line."""
    name = "vLLM" if "--plain" in options else "vLLM with KVBoost"
    found: dict[str, Any] = {}
    with sigterm_as_exit():
        path = [package_path(Path(__file__).resolve().parent)]
        if place.python == sys.executable:
            path += filter(None, [os.environ.get("PYTHONPATH")])
        variables = {**os.environ, **place.variables, "PYTHONPATH": os.pathsep.join(path)}
        command = [place.python, "-m", WORKER, *options]
        process = Process(name, command, variables, pipes=True)
        try:
            assert process.popen.stdin is not None and process.popen.stdout is not None
            with process.popen.stdin, process.popen.stdout as lines:
                for line in lines:
                    found = _report(line) or found
            if process.popen.wait():
                raise process.error(f"ended with {process.popen.returncode}")
            if not {"decode", "restart"} & found.keys():
                raise process.error("reported nothing")
        finally:
            process.stop()
    return found


def _report(line: bytes) -> dict[str, Any] | None:
    """A line of JSON; vLLM prints others."""
    if not line.startswith(b"{"):
        return None
    try:
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None
