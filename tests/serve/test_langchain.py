"""The LangChain example, against a server of the test's own."""

from __future__ import annotations

import pytest

from support.live_server import live_server
from support.load_script import load_example
from support.tiny import make_engine, tiny_model


def test_the_second_question_does_not_read_the_notes_again(capsys) -> None:
    pytest.importorskip("langchain_openai")
    example = load_example("langchain_client")
    model = tiny_model("llama", max_position_embeddings=4096)
    with make_engine(model) as engine, live_server(engine, served_names=("tiny",)) as server:
        example.main(["--url", f"{server.url}/v1", "--model", "tiny"])
    told = [line for line in capsys.readouterr().out.splitlines() if "were not read again" in line]
    first, second = (int(line.split()[0]) for line in told)
    assert first == 0 and second >= len(example.NOTES)
