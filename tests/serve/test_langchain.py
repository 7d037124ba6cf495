"""The LangChain example, against a server of the test's own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from live_server import live_server
from tiny import make_engine, tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "langchain_client.py"


def test_the_second_question_does_not_read_the_notes_again(capsys) -> None:
    pytest.importorskip("langchain_openai")
    spec = importlib.util.spec_from_file_location("langchain_client", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    model = tiny_model("llama", max_position_embeddings=4096)
    with make_engine(model) as engine, live_server(engine, served_names=("tiny",)) as server:
        example.main(["--url", f"{server.url}/v1", "--model", "tiny"])
    told = [line for line in capsys.readouterr().out.splitlines() if "were not read again" in line]
    first, second = (int(line.split()[0]) for line in told)
    assert first == 0 and second >= len(example.NOTES)
