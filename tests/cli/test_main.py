"""The command line on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvboost
from kvboost.cli import app
from kvboost.cli.demo import CODE_QUESTIONS
from support.homes import use_home
from support.tiny import save_tiny, tiny_model

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=8192))


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> None:
    use_home(monkeypatch, tmp_path)


def run(*arguments: str, **options: object):
    return runner.invoke(app, list(arguments), **options)


def test_every_command_has_help() -> None:
    shown = run("--help").output
    named = ("demo", "generate", "chat", "models", "doctor", "cache", "bench", "quality", "serve")
    for command in named:
        assert command in shown
        assert run(command, "--help").exit_code == 0


def test_version_is_one_line() -> None:
    done = run("--version")
    assert done.exit_code == 0
    assert done.output == f"kvboost {kvboost.__version__}\n"


def test_commands_import_only_what_they_need() -> None:
    """torch and transformers take seconds to import."""
    program = (
        "import sys; from kvboost.cli import app\n"
        "for command in ('--help', 'models', 'doctor'):\n"
        "    app([command], standalone_mode=False)\n"
        "    print('IMPORTED', *sys.modules, sep=',')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = [line.split(",") for line in done.stdout.splitlines() if line[:8] == "IMPORTED"]
    of_help, of_models, of_doctor = map(set, imported)
    assert not (of_help | of_models) & {"torch", "transformers", "numpy"}
    assert "torch" in of_doctor and "transformers" not in of_doctor


def test_generate_prints_text_or_json(model) -> None:
    plain = run("generate", "hello", "-m", model, "--max-new-tokens", "4")
    assert plain.exit_code == 0
    assert "% reused" in plain.output
    parsed = json.loads(
        run("generate", "-", "-m", model, "--max-new-tokens", "4", "--json", input="hello").stdout
    )
    assert len(parsed["token_ids"]) <= 4
    assert parsed["spans"][-1]["end"] == parsed["prompt_tokens"]
    assert parsed["timings"]["ttft_ms"] > 0
    assert parsed["answer_exact_from"] == parsed["healed_tokens"] == 0


def test_generate_keeps_to_a_format(model, tmp_path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"enum": ["yes", "no"]}')
    asked = ("generate", "hello", "-m", model, "--json")
    assert json.loads(run(*asked, "--schema", str(file)).stdout)["output_text"] in ('"yes"', '"no"')
    assert json.loads(run(*asked, "--regex", "ab").stdout)["output_text"] == "ab"
    file.write_text("[]")
    refused = run(*asked, "--schema", str(file))
    assert refused.exit_code == 2 and "must hold an object" in refused.output
    missing = run(*asked, "--schema", str(tmp_path / "none.json"))
    assert missing.exit_code == 2 and "cannot be read" in missing.output


def test_chat_shows_how_much_each_turn_reused(model) -> None:
    shown = run("chat", "-m", model, "--max-new-tokens", "4", input="hello there friend\nmore\n\n")
    assert shown.exit_code == 0
    turns = [line for line in shown.output.splitlines() if "% reused" in line]
    assert "you: hello there friend\n" in shown.output and "you: more\n" in shown.output
    assert len(turns) == 2
    assert "0% reused" in turns[0] and " 0% reused" not in turns[1]


def test_the_next_run_reuses_the_cache_folder(model, tmp_path) -> None:
    text = "The lamp burned paraffin until the cable came. " * 5
    kept = ("-m", model, "--max-new-tokens", "4", "--cache-dir", str(tmp_path / "kv"))
    first = json.loads(run("generate", f"{text} Why?", *kept, "--json").stdout)
    assert first["cached_tokens"] == 0
    second = json.loads(run("generate", f"{text} When?", *kept, "--json").stdout)
    assert second["cached_tokens"] >= len(text)
    assert second["spans"][0]["tier"] == "disk"
    shown = run("generate", f"{text} How?", *kept).output
    assert "from disk)" in " ".join(shown.split())


def test_chat_reuses_the_conversation_of_the_last_run(model, tmp_path) -> None:
    said = "hello there friend, it has been a long time\n\n"
    kept = ("-m", model, "--max-new-tokens", "4", "--cache-dir", str(tmp_path / "kv"))
    assert "0% reused;" in run("chat", *kept, input=said).output
    assert "from disk)" in run("chat", *kept, input=said).output


def test_kv_bits_sets_the_precision_of_the_cache(model, tmp_path) -> None:
    kept = ("--cache-dir", str(tmp_path / "kv"), "--kv-bits", "4")
    run("generate", "hello " * 40, "-m", model, "--max-new-tokens", "4", *kept)
    listed = json.loads(run("cache", "ls", "--dir", str(tmp_path / "kv"), "--json").stdout)
    assert listed and {entry["bits"] for entry in listed} == {4}


def test_models_says_how_a_model_would_run_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "plain")
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    monkeypatch.setattr("kvboost.model.fit.bandwidths.RAM_BYTES", 1 << 20)
    monkeypatch.setattr("kvboost.model.fit.bandwidths.DISK_BYTES", 1 << 20)
    folder = str(tmp_path / "plain")
    found = json.loads(run("models", folder, "--json").stdout)
    assert json.loads(run("models", "--json", folder).stdout).keys() == found.keys()
    assert found["layers"] == 3 and found["fits"][-1]["how"] == "resident"
    assert found["unsupported"] is None and found["features"]["moved"] == "yes"
    assert set(found["bytes_per_s"]) >= {"ram", "disk"}
    shown = run("models", folder).output
    assert "plain: llama" in shown and "resident" in shown and "GB/s" in shown
    assert "shared forwards" in shown and "GGUF, awq" in shown
    refused = run("models", str(tmp_path / "none.gguf"))
    assert refused.exit_code == 2 and "there is no GGUF file" in refused.stderr


def test_models_lists_names_and_refuses_unknown_ones() -> None:
    listed = json.loads(run("models", "--json").stdout)
    assert [info["name"] for info in listed] == ["all-minilm-l6-v2", "smollm2-135m"]
    assert "smollm2-135m" in run("models").output
    refused = run("models", "pull", "gpt-7")
    assert refused.exit_code == 2
    assert "bundled: smollm2-135m" in refused.stderr
    assert "did you mean 'smollm2-135m'" in run("models", "pull", "smollm2").stderr


def test_doctor_shows_facts_and_advice() -> None:
    findings = json.loads(run("doctor", "--json").stdout)
    assert {"torch", "device", "dtype", "cache folder"} <= set(findings["facts"])
    assert any("on first use" in advice for advice in findings["advice"])
    shown = run("doctor").output
    assert "torch" in shown and "True" not in shown and "False" not in shown


def test_doctor_reports_a_folder_that_cannot_be_used(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "file"))
    findings = json.loads(run("doctor", "--json").stdout)
    assert findings["facts"]["cache folder is"] == "not a folder"
    assert any("KVBOOST_HOME" in advice for advice in findings["advice"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "hello", "-m", "./nowhere"), "no model folder"),
        (("generate", ""), "prompt is empty"),
        (("generate", "hello", "--dtype", "int3"), "dtype='int3'"),
        (("generate", "hello", "--kv-bits", "3"), "--kv-bits=3"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(model, arguments, message) -> None:
    if "-m" not in arguments:
        arguments = (*arguments, "-m", model)
    if arguments[1] == "":
        arguments = (*arguments, "--no-chat")
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_the_demo_compares_what_it_claims(model) -> None:
    shown = run("demo", "-m", model, "--quick", "--json")
    assert shown.exit_code == 0, shown.output
    assert f"asked last: {CODE_QUESTIONS[1][:40]}" in shown.stderr
    asked = json.loads(shown.stdout)
    assert [one["prompt"] for one in asked] == [
        *("chat, turn 1", "chat, turn 2", "code, question 1", "code, question 2", "order 1")
    ]
    exact, moved = asked[:4], asked[4:]
    for one in asked:
        assert one["same"] == (one["baseline"]["token_ids"] == one["reuse"]["token_ids"])
    assert all(one["same"] and one["mean_kl"] is None for one in exact)
    assert exact[-1]["reuse"]["kv_reuse_ratio"] > 0.9
    assert len(moved) == 1
    for one in moved:
        assert one["reuse"]["moved_tokens"] > 1000 and one["reuse"]["recomputed_tokens"] > 0
        assert one["mean_kl"] > 0


def test_quality_measures_draws_saves_and_loads(model, tmp_path) -> None:
    rows, picture = tmp_path / "rows.jsonl", tmp_path / "quality.png"
    options = ("--passages", "3", "--passage-tokens", "80", "--answer-tokens", "3")
    chosen = ("--strategy", "auto", "--strategy", "none", "--donor", "header", "--limit", "2")
    outputs = ("--save", str(rows), "--plot", str(picture))
    done = run("quality", "-m", model, *options, *chosen, *outputs, "--dtype", "float32")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.splitlines()[-1])
    assert [one["strategy"] for one in report["summaries"]] == ["auto", "none"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = json.loads(run("quality", "--load", str(rows)).stdout.splitlines()[-1])
    assert again["summaries"] == report["summaries"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--strategy", "magic"), "strategy='magic' is not available"),
        (("--ratio", "1.5"), "ratio=1.5 must be a number between"),
        (("--part", "3/2"), "part='3/2' must be such as"),
        (("--dataset", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--plot", "picture.doc"), "picture.doc"),
        (("--load", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_quality_refuses_bad_options_before_it_loads_a_model(arguments, message) -> None:
    done = run("quality", "-m", "no-such-model", *arguments)
    assert done.exit_code == 2
    assert message in done.stderr and "Traceback" not in done.output
