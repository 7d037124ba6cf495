"""The image, as far as it can be checked without a container engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import yaml
from typer.testing import CliRunner

from kvboost.cli import app
from support.fake_engine import ReadsForever
from support.live_server import live_server

ROOT = Path(__file__).parents[2]


def steps() -> list[tuple[str, str]]:
    """The instructions of the Dockerfile and their arguments."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    split = (line.split(maxsplit=1) for line in lines if line and not line.startswith("#"))
    return [(instruction, rest) for instruction, rest in split]


def arguments(instruction: str) -> str:
    (found,) = [rest for name, rest in steps() if name == instruction]
    return found


def ignored() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_what_is_copied_is_enough_to_build_the_package(tmp_path) -> None:
    context, kept = tmp_path / "app", {line[1:] for line in ignored() if line.startswith("!")}
    context.mkdir()
    for instruction, rest in steps():
        if instruction != "COPY":
            continue
        *sources, target = shlex.split(rest)
        for source in sources:
            assert source in kept, f".dockerignore leaves out {source}"
            if (ROOT / source).is_dir():
                skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / source, context / target, ignore=skip)
            else:
                shutil.copy(ROOT / source, context / target)
    program = "import sys; from setuptools.build_meta import build_wheel as b; b(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], cwd=context, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("kvboost-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvboost/serve/static/index.html" in names and "kvboost/py.typed" in names
    assert any(name.endswith("entry_points.txt") for name in names)


def test_the_extras_that_it_installs_exist() -> None:
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", (ROOT / "Dockerfile").read_text())
    defined = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert set(extras.split(",")) <= set(defined)


def test_the_image_does_not_run_as_root() -> None:
    order = [name for name, _ in steps()]
    assert arguments("USER") == "1000" and order.index("USER") > len(order) - 1 - order[::-1].index(
        "RUN"
    )


def test_the_entry_point_is_a_command_that_parses() -> None:
    program, *given = json.loads(arguments("ENTRYPOINT"))
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    shown = CliRunner().invoke(app, [*given, *services["server"]["command"], "--help"])
    assert program == "kvboost" and shown.exit_code == 0, shown.output


def test_the_health_check_finds_a_server_that_is_not_ready_yet() -> None:
    python, *rest = json.loads(arguments("HEALTHCHECK").partition(" CMD ")[2])
    assert python == "python" and arguments("EXPOSE") == "8000"
    with live_server(ReadsForever(), warm=(("handbook.md", "A lamp."),)) as server:
        command = [sys.executable, *(one.replace(":8000", f":{server.port}") for one in rest)]
        assert str(server.port) in command[-1]
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert subprocess.run(command, capture_output=True).returncode == 0
    assert subprocess.run(command, capture_output=True).returncode != 0
