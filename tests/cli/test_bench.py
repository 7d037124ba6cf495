"""``kvboost bench``: the studies, on a tiny model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvboost.bench.full import JOBS
from kvboost.cli import app
from tiny import byte_tokenizer, tiny_model

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama", max_position_embeddings=8192).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))


def run(*arguments: str):
    return runner.invoke(app, ["bench", *arguments])


def report_of(done) -> dict:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.splitlines()[-1])


def test_every_benchmark_of_a_whole_run_is_a_command_with_the_options_it_is_given() -> None:
    shown = run("--help").output
    for job in JOBS:
        assert job.name in shown
        told = run(job.name, "--help").output
        options = {word for word in (*job.full, *(job.quick or ())) if word.startswith("--")}
        for option in options | ({"--plot"} if job.plots else set()):
            assert option in told, (job.name, option)
    assert "history" in shown and "all" in shown


def test_a_breakdown_is_measured_drawn_and_remembered(model, tmp_path) -> None:
    picture, file = tmp_path / "b.png", tmp_path / "history.jsonl"
    options = ("--tokens", "400", "--rounds", "1", "--dtype", "float32")
    report = report_of(
        run("breakdown", "-m", model, *options, "--plot", str(picture), "--history", str(file))
    )
    assert [row["case"] for row in report["rows"]] == ["baseline", "exact", "moved"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    (line,) = file.read_text().splitlines()
    assert "rows/exact 400/outside" in json.loads(line)["figures"]


def test_a_sweep_and_a_scaling_end_with_json(model) -> None:
    few = ("--chunk-size", "64", "--bits", "16", "--strategy", "none", "--limit", "1")
    report = report_of(run("sweep", "-m", model, "--quick", "--chunking", "fixed", *few))
    assert [one["strategy"] for one in report["settings"]] == ["none"]
    sizes = ("--tokens", "128", "--tokens", "96", "--chunks", "32", "--requests", "1")
    report = report_of(run("scaling", "-m", model, *sizes, "--rounds", "1"))
    assert [one["name"] for one in report["series"]] == ["full prefill", "exact hit"]
    assert [point["size"] for point in report["series"][0]["points"]] == [96, 128]


def test_memory_is_measured_in_another_process(model) -> None:
    report = report_of(run("memory", "-m", model, "--bits", "8", "--tokens", "400"))
    (row,) = report["rows"]
    assert row["bytes_per_token"] == row["expected_bytes_per_token"]
    assert row["serve_peak"] > row["libraries"] > 0
    assert row["difference"] == pytest.approx(row["serve_peak"] - row["predicted"])


def made(tmp_path, name: str, median: float, commit: str):
    sample = {"median_ms": median, "min_ms": median - 1, "max_ms": median + 1}
    report = {
        "benchmark": "x",
        "date": f"2026-11-0{len(commit)}",
        "commit": commit,
        "model": "m",
        "machine": {"cpu": "c"},
        "cost": sample,
    }
    path = tmp_path / name
    path.write_text(f"table\n{json.dumps(report)}\n")
    return str(path)


def test_history_is_added_to_shown_and_compared(tmp_path) -> None:
    file = ("--file", str(tmp_path / "h.jsonl"))
    first, second = made(tmp_path, "a", 50.0, "a"), made(tmp_path, "b", 20.0, "bb")
    assert "1 figures added" in run("history", "add", first, second, *file).output
    assert "50.0 [49.0-51.0]" in run("history", "show", *file).output
    done = run("history", "compare", "x", *file)
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["verdicts"] == {"cost": "faster by 2.50 ×"}
    picture = tmp_path / "trend.svg"
    assert run("history", "show", "x", *file, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("breakdown", "--tokens", "100"), "tokens=100"),
        (("sweep", "--chunking", "magic"), "chunking='magic'"),
        (("memory", "--bits", "3"), "bits=3"),
        (("memory", "--tokens", "64"), "tokens=64"),
        (("scaling", "--chunks", "2"), "chunks=2"),
        (("scaling", "--plot", "a.doc"), "must end in"),
        (("buglocal", "--hint", "all"), "hint='all'"),
        (("all", "--only", "nonsense"), "only='nonsense'"),
        (("history", "show", "--file", "nowhere.jsonl"), "nowhere.jsonl"),
        (("history", "add", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_found_before_a_model_is_loaded(arguments, message) -> None:
    extra = () if arguments[0] in ("all", "history") else ("-m", "no-such-model")
    done = run(*arguments, *extra)
    assert done.exit_code == 2
    assert message in done.stderr.replace("\n", "")
    assert "Traceback" not in done.output
