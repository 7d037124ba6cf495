"""Engines over a pipe: the protocol, our clock, and engines that are missing, die or hang."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvboost.bench.peers import environments, process
from kvboost.bench.peers.contenders import Contenders
from kvboost.bench.peers.engines import ENGINES, OWN, PEERS, STOCK
from kvboost.bench.peers.servers import OURS
from kvboost.bench.peers.setting import Setting, prepare
from kvboost.bench.peers.worker import Worker
from kvboost.bench.peers.workers import kvboost_here, stock
from kvboost.errors import KVBoostError
from kvboost.progress import Progress
from support.fake_worker import fake_engine
from support.tiny import save_tiny


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("smollm2-135m", tmp_path, 1, threads=1, context_length=512, dtype="float32")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.5)


def state_of(number: int) -> str:
    return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def worker(setting: Setting) -> Iterator[Worker]:
    made = Worker(fake_engine(), setting)
    yield made
    made.close()


def test_the_clock_runs_here_and_stops_at_the_first_token(setting: Setting) -> None:
    worker = Worker(fake_engine(first_s=0.2, rest_s=1.0), setting)
    start = time.perf_counter()
    answer = worker.ask([1, 2, 3], "one two three")
    outside_ms = (time.perf_counter() - start) * 1e3
    worker.close()
    assert 200 <= answer.ttft_ms <= answer.total_ms - 500  # the pipe may be half a second late
    assert answer.total_ms <= outside_ms


def test_a_worker_says_what_it_is_and_what_it_reused(worker: Worker) -> None:
    assert (worker.version, worker.weights) == ("fake 1.0", "float32")
    assert worker.ask([1, 2, 3, 4], "").cached_tokens == 0
    again = worker.ask([1, 2, 9], "")
    assert (again.prompt_tokens, again.cached_tokens) == (3, 2)


def test_text_travels_beside_the_ids_and_one_that_does_not_stream_is_timed(
    setting: Setting,
) -> None:
    given = {"counts_words": True, "tells": False, "rest_s": 0.2, "streams": False}
    worker = Worker(fake_engine(**given), setting)
    answer = worker.ask([1], "füñf wörds \n and “two” lines")
    worker.close()
    assert (answer.prompt_tokens, answer.cached_tokens) == (5, None)
    assert answer.ttft_ms >= 200  # the end is the first token


def is_frozen_soon(number: int) -> bool:
    """Whether it is frozen soon: a signal is not obeyed at once on a busy machine."""
    deadline = time.monotonic() + 5
    while state_of(number) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    return state_of(number) == "T"


def test_a_worker_is_frozen_while_it_is_not_asked_and_can_be_closed(worker: Worker) -> None:
    number = worker._process.pid
    assert is_frozen_soon(number)
    worker.ask([1], "one")
    assert is_frozen_soon(number)
    worker.close()
    assert not Path(f"/proc/{number}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for it")
def test_a_frozen_worker_does_not_outlive_a_driver_that_is_killed(setting: Setting) -> None:
    code = (
        "import os, signal; from support.fake_worker import fake_engine\n"
        "from kvboost.bench.peers.setting import Setting\n"
        "from kvboost.bench.peers.worker import Worker; from pathlib import Path\n"
        f"setting = Setting('m', Path({str(setting.folder)!r}), 1, 1, 9)\n"
        "print(Worker(fake_engine(), setting)._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": paths},
    )
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stat.exists() or state_of(int(done.stdout)) == "Z"


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("die", r"ended with 5(?s:.)*last words"),
        ("hang", r"did not answer in time(?s:.)*last words"),
        ("raise", r"ValueError: prompt refused(?s:.)*last words"),
    ],
)
def test_a_worker_that_fails_shows_its_last_words(setting: Setting, then: str, said: str) -> None:
    worker = Worker(fake_engine(after=1, then=then), setting)
    worker.ask([1], "")
    with pytest.raises(KVBoostError, match=said):
        worker.ask([2], "", timeout=1.0)
    worker.close()


def test_an_engine_that_cannot_load_says_why(setting: Setting) -> None:
    with pytest.raises(KVBoostError, match=r"ended with 3(?s:.)*no such weights"):
        Worker(fake_engine(load="die"), setting)
    with pytest.raises(KVBoostError, match=r"in time(?s:.)*compiling"):
        Worker(fake_engine(load="hang"), setting, timeout=1.0)


def test_an_engine_that_cannot_start_says_why(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(KVBoostError, match=r"fake could not be started: .*/no/such/python"):
        Worker(fake_engine(), setting)


def test_the_other_engines_go_on(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "empty"))
    engines = [
        fake_engine("good"),
        fake_engine("unloadable", load="die"),
        ENGINES["vllm"],
        fake_engine("hanging", after=1, then="hang"),
    ]
    with Contenders(engines, setting, str, ask_seconds=0.5) as crew, Progress("") as progress:
        crew.start(progress)
        assert crew.names == ["good", "hanging"]
        for name in ("hanging", "hanging", "good", "hanging"):
            last = crew.ask(name, [1, 2])
        assert last is None and crew.names == ["good"]
        assert crew.ask("good", [1, 2]).cached_tokens == 2
    assert set(crew.failures) == {"unloadable", "hanging"}
    assert list(crew.missing) == ["vllm"] and "run make peers" in crew.missing["vllm"]
    assert set(crew.as_json()["engines"]) == {"good", "hanging"}


def test_missing_engines_name_the_remedy(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    assert all(ENGINES[name].missing(setting) is None for name in OWN)
    for name in PEERS:
        engine = ENGINES[name]
        assert f"setup_peers.py {engine.environment}" in str(engine.missing(setting))
        (tmp_path / "peers" / str(engine.environment)).mkdir(parents=True)
        (tmp_path / "peers" / str(engine.environment) / environments.READY).touch()
    without = {name for name in PEERS if "smollm2-135m.gguf" in str(ENGINES[name].missing(setting))}
    assert without == {"llama.cpp", "openvino"}


def test_no_other_environment_sees_our_packages(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    for name, engine in ENGINES.items():
        assert ("PYTHONPATH" in engine.variables(setting)) == (name in OWN)
        assert engine.variables(setting)["OMP_NUM_THREADS"] == "1"
        assert engine.script is None or engine.script.is_file()


def test_stock_and_ours_say_what_they_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process; tests/bench/ttft/test_ttft.py asks over the pipe."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    save_tiny(tmp_path, max_position_embeddings=1024)
    setting, vocabulary = prepare(str(tmp_path), threads=1, dtype=torch.float32)
    assert setting.context_length == 1024
    ids = vocabulary.encode("The same text, said by two engines. " * 10)
    assert vocabulary.encode(vocabulary.decode(ids)) == ids
    said = {}
    for name, worker in ((STOCK, stock), (OURS, kvboost_here)):
        engine, seen = worker.Engine(ENGINES[name].given(setting)), []
        for prompt in (ids, ids + ids[:5]):
            request = {"ids": prompt, "max_tokens": 1}
            said[name] = engine.generate(request, lambda seen=seen: seen.append(1))
        assert len(seen) == 2
    assert said[STOCK]["cached_tokens"] == 0
    assert said[OURS]["cached_tokens"] >= len(ids) - 1
    assert {one["prompt_tokens"] for one in said.values()} == {len(ids) + 5}
