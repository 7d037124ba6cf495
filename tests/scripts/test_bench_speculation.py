"""The benchmark of drafts runs, and compares the same answers."""

from __future__ import annotations

import json

from load_script import load_script
from tiny import byte_tokenizer, tiny_model


def test_it_measures_every_task(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    tiny_model("llama", max_position_embeddings=4096).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    script = load_script("bench_speculation")
    assert all(task(number) for task in script.TASKS.values() for number in range(8))
    options = ["--rounds", "1", "--tokens", "6", "--users", "1", "2"]
    script.main(["--model", str(tmp_path), *options])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["task"], row["users"]) for row in report["tasks"]] == [
        (task, users) for users in (1, 2) for task in ("code edit", "quote", "chat")
    ]
    assert all(row["speedup"] > 0 and row["tokens"] <= 12 for row in report["tasks"])
