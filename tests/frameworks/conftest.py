"""Frameworks, unchanged, against a real server with a real model.

These tests need the environments "frameworks" and "clients", which have no KVBoost; ``make
test-frameworks`` makes them and runs the tests in one after the other. The server runs in the
project's own environment.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.request import urlopen

import pytest

from support.server_process import ServerProcess

OF_FRAMEWORKS = [
    *("test_history.py", "test_howto.py", "test_instructor.py", "test_litellm.py"),
    *("test_llama_index.py", "test_mini_swe_agent.py", "test_ollama.py", "test_tool_runner.py"),
]
OF_CLIENTS = [
    *("test_continue.py", "test_guidellm.py", "test_lm_eval.py", "test_open_webui.py"),
    "test_vllm_bench.py",
]
ENVIRONMENT = os.environ.get("KVBOOST_TEST_FRAMEWORKS", "")
"""The name of the environment; what is in both of them runs in both."""
collect_ignore_glob = {"frameworks": OF_CLIENTS, "clients": OF_FRAMEWORKS}.get(
    ENVIRONMENT, ["test_*.py"]
)

MODEL = os.environ.get("KVBOOST_FRAMEWORKS_MODEL", "smollm2-135m")
ran: dict[tuple[str, str], list[str]] = {}
"""What was run, by the package and its version."""


@dataclass(frozen=True)
class Server:
    """A server that listens at ``root``; OpenAI's API is at ``url``."""

    root: str
    url: str
    model: str = MODEL


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    source = str(Path(__file__).parents[2] / "src")
    python = os.environ["KVBOOST_SERVER_PYTHON"]
    arguments = ("--model", MODEL, "--served-name", MODEL, "--dtype", "float32")
    with ServerProcess(
        *arguments, folder=folder, python=python, start_seconds=600.0, PYTHONPATH=source
    ) as process:
        yield Server(process.root, process.url)


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The folder of the server's model, for clients that read its tokenizer or its weights."""
    if Path(MODEL).is_dir():
        return Path(MODEL)
    program = "from kvboost.model.loading.weights import pull_model; import sys; "
    program += "print(pull_model(sys.argv[1]))"
    command = [os.environ["KVBOOST_SERVER_PYTHON"], "-c", program, MODEL]
    return Path(subprocess.check_output(command, text=True).splitlines()[-1])


@pytest.fixture
def knows_every_field(server: Server) -> Iterator[None]:
    """Asserts that the server has left out no field of a request."""
    before = left_out(server)
    yield
    assert left_out(server) == before


def left_out(server: Server) -> float:
    return metric(server, "kvboost_ignored_fields_total")


def metric(server: Server, name: str) -> float:
    """A number of ``/metrics``. ``name`` has the labels, if there are any."""
    with urlopen(f"{server.root}/metrics") as answer:
        (count,) = re.findall(rf"^{re.escape(name)} (\S+)$", answer.read().decode(), re.M)
    return float(count)


@pytest.fixture
def rows(server: Server) -> Callable[[str], float]:
    """Counts rows of prompts so far by their source, such as "exact" and "moved"."""
    return lambda source: metric(server, f'kvboost_prompt_tokens_total{{source="{source}"}}')


@pytest.fixture
def has_run() -> Callable[..., None]:
    """Notes for the table what a test has run to its end. The version is that of the package here
    unless another is given."""

    def note(package: str, what: str, number: str | None = None) -> None:
        ran.setdefault((package, number or version(package)), []).append(what)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of docs/howto/agents.md."""
    lines = ["| package | version | run against `kvboost serve` |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {number} | {'; '.join(ran[name, number])} |" for name, number in sorted(ran)
    ]
    terminalreporter.write_line(f"\nmodel: {MODEL}\n" + "\n".join(lines))
