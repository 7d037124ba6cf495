"""Every example runs, and its answers match."""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from support.live_server import live_server
from support.load_script import load_example
from support.tiny import make_engine, save_tiny, tiny_model

ROOT = Path(__file__).parents[1]
CODE = re.compile(r"^```py\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def test_every_pattern_runs_and_its_answers_match(tmp_path, monkeypatch) -> None:
    save_tiny(tmp_path, max_position_embeddings=16384, num_hidden_layers=2)
    monkeypatch.syspath_prepend(ROOT / "examples")
    options = ["all", "--model", str(tmp_path), "--max-new-tokens", "4"]
    done = CliRunner(env={"COLUMNS": "120"}).invoke(load_example("run").app, options)
    assert done.exit_code == 0, done.output
    patterns = ("chatbot", "rag", "fewshot", "multiturn", "code")
    assert all(f"\n{name}: " in done.output for name in patterns)
    verdict = "5 of 5 answers, compared token by token, are the same"
    assert done.output.count(verdict) == len(patterns)


def test_the_coding_agent_computes_less_than_with_a_prefix_cache(tmp_path, capsys) -> None:
    for number, name in enumerate(("a.py", "b.py", "c.py")):
        (tmp_path / name).write_text("".join(f"x{n} = {n * n + number}\n" for n in range(40)))
    agent = load_example("coding_agent")
    asked = [*map(str, sorted(tmp_path.glob("*.py"))), "--trigger", "1000", "--keep", "1"]
    model = tiny_model("llama", max_position_embeddings=8192, num_hidden_layers=2)
    computed = {}
    with (
        make_engine(model, reuse_moved="always") as engine,
        live_server(engine, served_names=("tiny",)) as server,
    ):
        for mode in ("chunk_kv_reuse", "prefix_cache"):
            where = ["--url", f"{server.url}/v1", "--mode", mode, "--max-tokens", "100"]
            agent.main([*asked, *where])
            lines = capsys.readouterr().out.splitlines()
            total = next(line.split() for line in lines if line.startswith("all "))
            cleared, rows, exact, approximate, moved, computed[mode] = (
                int(number.replace(",", "")) for number in total[1:7]
            )
            assert cleared >= 2 and rows == exact + approximate + moved + computed[mode]
            assert (moved > 0) == (mode == "chunk_kv_reuse")
    assert computed["chunk_kv_reuse"] < computed["prefix_cache"]


def test_the_page_on_the_coding_agent_shows_its_code() -> None:
    source = (ROOT / "examples" / "coding_agent.py").read_text()
    blocks = CODE.findall((ROOT / "docs" / "howto" / "coding-agent.md").read_text())
    assert blocks and all(block in source for block in blocks)
