"""The benchmark of JSON answers runs and counts what it says."""

from __future__ import annotations

import json

from load_script import load_script
from tiny import byte_tokenizer, tiny_model


def test_json_takes_fewer_forwards_than_free_text(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path))
    tiny_model("llama", max_position_embeddings=1024).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    load_script("bench_structured").main(["--model", str(tmp_path), "--rounds", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["forwards"] < report["free_forwards"] - 50
    assert report["tokens"] > 100 and report["mask_us"] > 0
