"""vLLM's own server with the connector, asked over HTTP: metrics, usage, and ``kvboost vllm``."""

from __future__ import annotations

import bisect
import heapq
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvboost
from kvboost.cli import app
from kvboost.config import EngineConfig
from kvboost.integrations.vllm.environment import TRANSFER
from kvboost.reuse.repair import MOST_BUDGET
from support.vllm_engines import ALWAYS, MODEL, PAGE

NAME = "small"
START_SECONDS = 600
WORDS = "Insert item x in list a, and keep it sorted assuming a is sorted."
QUESTION = "\n\nQuestion: which function inserts an item into a sorted list?\nAnswer: The function"


class Server:
    """vLLM's API server as a process; what it prints is in ``log``."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log: list[str] = []
        transfer = {**TRANSFER, "kv_connector_extra_config": ALWAYS}
        options = ["--model", str(MODEL), "--served-model-name", NAME, "--dtype", "float32"]
        options += ["--max-model-len", "2048", "--max-num-seqs", "4", "--block-size", str(PAGE)]
        options += ["--enforce-eager", "--host", "127.0.0.1", "--port", str(port)]
        options += ["--kv-transfer-config", json.dumps(transfer)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(kvboost.__file__).parents[1]),
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            },
        )
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self._ready.wait(START_SECONDS)
        assert self._process.poll() is None and self._is_up(), "".join(self.log[-30:])

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def complete(self, prompt: str, **more: Any) -> dict[str, Any]:
        body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        return self.post("/v1/completions", {**body, **more})

    def metrics(self) -> dict[str, float]:
        """Ours, by name and by the last of their labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        found = {}
        for line in lines:
            if match := re.fullmatch(r"vllm:kvboost_(\w+)\{(.*)\} (\S+)", line):
                labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
                assert labels.pop("model_name") == NAME and labels.pop("engine") == "0"
                found["/".join([match[1], *labels.values()])] = float(match[3])
        return found

    def fresh(self) -> None:
        """Empties vLLM's own prefix cache."""
        assert self.post("/reset_prefix_cache") == {"success": True}

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait()
        self._reader.join()

    def _is_up(self) -> bool:
        return any("startup complete" in line for line in self.log)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self.log.append(line)
                if "startup complete" in line:
                    self._ready.set()
        self._ready.set()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("documents")
    paths = []
    for module in (bisect, heapq):
        paths.append(folder / f"{module.__name__}.txt")
        paths[-1].write_text(inspect.getsource(module)[:1500])
    return paths


@pytest.fixture(autouse=True)
def empty(server: Server) -> None:
    server.fresh()
    run(server, "forget", "--everything")


def run(server: Server, *arguments: str) -> dict[str, Any]:
    """A command of ``kvboost vllm``; what it prints as JSON."""
    done = CliRunner().invoke(app, ["vllm", *arguments, "--url", server.url, "--json"])
    assert done.exit_code == 0, done.output
    printed: dict[str, Any] = json.loads(done.output)
    return printed


def test_answers_and_metrics_separate_exact_moved_and_recomputed(
    server: Server, files: list[Path]
) -> None:
    warmed = run(server, "warm", *map(str, files))
    assert [one["known_tokens"] for one in warmed["documents"]] == [0, 0]
    server.fresh()
    before = server.metrics()
    first, second = (path.read_text() for path in files)
    exact = server.complete(first + QUESTION)["kv_transfer_params"]["kvboost"]
    assert exact["exact_tokens"] > 300 and exact["moved_tokens"] == 0
    moved = server.complete(f"Read.\n{second}{first}{QUESTION}")["kv_transfer_params"]["kvboost"]
    most = round(MOST_BUDGET * EngineConfig.recompute_ratio * moved["moved_tokens"])
    assert moved["moved_tokens"] > 700 and 0 < moved["recomputed_tokens"] <= most
    after = server.metrics()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["prompt_tokens_total/exact"] == exact["exact_tokens"] + moved["exact_tokens"]
    assert grown["prompt_tokens_total/recomputed"] == moved["recomputed_tokens"]
    assert grown["prompt_tokens_total/moved"] == moved["moved_tokens"] - moved["recomputed_tokens"]
    assert grown["loads_total/loaded"] == grown["load_seconds_count"] == 2
    assert grown["loads_total/failed"] == 0 and grown["load_seconds_sum"] > 0
    stats = run(server, "stats")
    assert stats["prompt_tokens"]["exact"] == after["prompt_tokens_total/exact"]
    after = server.metrics()  # with what the command has seen
    assert after["cache_chunks"] == stats["chunks"] > 0
    assert after["tier_bytes/ram"] == stats["tiers"]["ram"]["bytes"] > 10**6
    assert after["tier_chunks/ram"] == stats["chunks"]
    assert after["tier_max_bytes/ram"] == 2 * 1024**3


def test_a_chat_is_answered_with_its_usage(server: Server, files: list[Path]) -> None:
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": files[0].read_text()}],
        "max_tokens": 1,
    }
    assert server.post("/v1/chat/completions", body)["kv_transfer_params"] is None
    server.fresh()
    answer = server.post("/v1/chat/completions", body)
    assert answer["kv_transfer_params"]["kvboost"]["exact_tokens"] > 300


def test_a_document_is_warmed_once_and_forgotten_by_its_words(
    server: Server, files: list[Path]
) -> None:
    run(server, "warm", str(files[0]), str(files[1]))
    server.fresh()
    again = run(server, "warm", str(files[0]))
    (document,) = again["documents"]
    assert document["known_tokens"] > document["tokens"] - 2 * PAGE > 300
    assert WORDS in files[0].read_text()
    forgotten = run(server, "forget", WORDS)["forgotten"]
    assert 0 < forgotten < again["chunks_of_salt"]
    stats = run(server, "stats")
    assert stats["chunks"] == again["chunks_of_salt"] - forgotten
    assert run(server, "forget", WORDS) == {"forgotten": 0}


def test_salts_are_apart(server: Server, files: list[Path]) -> None:
    mine = run(server, "warm", str(files[0]), "--salt", "mine")["chunks_of_salt"]
    assert mine > 0
    assert run(server, "forget", "--everything") == {"forgotten": 0}
    assert run(server, "forget", "--everything", "--salt", "theirs") == {"forgotten": 0}
    stats = run(server, "stats")
    assert (stats["chunks"], stats["chunks_of_salt"]) == (mine, 0)
    assert run(server, "forget", "--everything", "--salt", "mine") == {"forgotten": mine}


def test_a_document_that_is_too_long_is_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(inspect.getsource(heapq) * 2)
    done = CliRunner().invoke(app, ["vllm", "warm", str(path), "--url", server.url])
    assert done.exit_code == 2 and "maximum context length" in done.output
