"""vLLM with the connector and without: from what its processes print to tables and goals."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import vllm, vllm_runs
from benchmarks.entries import BENCHMARKS
from benchmarks.vllm_runs import WORKER, Place, find_place, run_worker
from kvboost.bench.peers import environments
from kvboost.errors import KVBoostError

PROGRAM = """#!{python}
import json, os, pathlib, sys
given = sys.argv[1:]
with open({asked!r}, "a") as asked:
    asked.write(json.dumps({{"given": given, "path": os.environ["PYTHONPATH"]}}) + "\\n")
packages = pathlib.Path(os.environ["PYTHONPATH"])
assert (packages / "kvboost" / "engine.py").is_file()
assert (packages / "benchmarks" / "vllm_connector.py").is_file()
print("INFO vLLM says a lot")
print("{{'not': 'JSON'}}")
if "--restart" in given:
    folder = pathlib.Path(given[given.index("--folder") + 1])
    if given[given.index("--restart") + 1] == "write":
        (folder / "written").touch()
        print(json.dumps({{"restart": {{"documents": 5}}}}))
        sys.exit()
    assert (folder / "written").exists()
    tokens = int(given[given.index("--lengths") + 1])
    found = {{"tokens": tokens, "documents": 5, "disk_ms": 20.0, "full_ms": 160.0}}
    print(json.dumps({{"restart": found}}))
    sys.exit()
plain = "--plain" in given
lengths = given[given.index("--lengths") + 1].split(",")
decode = {{"requests": 64, "step_ms": 10 if plain else 10.2}}
report = {{"shape": "7b", "plain": plain, "decode": decode}}
for length in lengths:
    found = {{"cold_ms": 100.0 if plain else 102.0}}
    if not plain:
        found |= {{"off_ms": 100.0, "moved_ms": 30.0, "moved_over_off": 0.3, "moved_tokens": 700}}
    report[length] = found
    print(json.dumps({{length: found}}))
{end}
print(json.dumps(report))
"""


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


def make_place(folder: Path, end: str = "") -> Place:
    """A program in the place of Python; it notes what it is asked."""
    program = folder / "python"
    text = PROGRAM.format(python=sys.executable, asked=str(folder / "asked"), end=end)
    program.write_text(text)
    program.chmod(0o755)
    return Place(str(program), "vllm 0.26.1", "cuda")


def asked(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "asked").read_text().splitlines()]


def perform(
    place: Place, monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[dict[str, Any], str]:
    monkeypatch.setattr(vllm, "find_place", lambda: place)
    monkeypatch.setattr("kvboost.bench.kit.machine.torch.cuda.get_device_name", lambda _: "H200")
    console = Console(record=True, width=100)
    settings = BENCHMARKS["vllm"].settings(**given)
    return BENCHMARKS["vllm"].perform(settings, console), console.export_text()


def test_the_table_compares_both_and_the_goals_are_judged(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, shown = perform(place, monkeypatch)
    runs = asked(tmp_path)
    assert ["--plain" in one["given"] for one in runs[:4]] == [False, True, False, True]
    assert [one["given"][-1] for one in runs[4:6]] == ["write", "read"]
    assert len(runs) == 6
    assert runs[0]["given"][:4] == ["-m", WORKER, "--lengths", "2048,8192,32768"]
    assert "--shape" in runs[0]["given"] and "--eager" not in runs[0]["given"]
    assert record["moved"] == {"2048": 0.3, "8192": 0.3, "32768": 0.3}
    assert record["cold"]["8192"] == 1.02
    assert [goal["met"] for goal in record["goals"]] == [True, True, False, *[True] * 3]
    assert record["restart"]["ratio"] == 0.125 and record["restart"]["tokens"] == 4096
    assert "4,096 tokens ÷ an unknown one" in shown and "0.125" in shown
    assert "8,192 tokens: moved ÷ computed" in shown and "0.300" in shown
    assert "starts vLLM 4 times" in shown and "left" in shown
    assert "CPUs" not in shown


def test_another_shape_is_measured_but_not_judged(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"shape": "0.5b", "lengths": (2048,), "turns": 1, "restart": 0}
    record, _ = perform(place, monkeypatch, **given)
    assert record["restart"] is None
    assert all(goal["met"] is None for goal in record["goals"])
    assert record["goals"][1]["figure"] == "not measured"


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("sys.exit('no memory left')", r"ended with 1(?s:.)*no memory left"),
        ("sys.exit(0)", "reported nothing"),
    ],
)
def test_a_worker_that_fails_shows_its_last_words(tmp_path: Path, end: str, said: str) -> None:
    with pytest.raises(KVBoostError, match=said):
        run_worker(make_place(tmp_path, end), ["--lengths", "768"])


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_runs, "find_spec", lambda name: None)
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    with pytest.raises(KVBoostError, match=r"kvboost doctor --vllm(?s:.)*run make peers"):
        find_place()
    assert environments.why_missing(environments.VLLM) is not None
