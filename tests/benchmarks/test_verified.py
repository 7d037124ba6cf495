from __future__ import annotations

import io
import json
from argparse import Namespace

from benchmarks import verified
from kvboost.bench.texts.questions import Question
from support.tiny import make_engine, tiny_model


def test_answers_of_all_ways_are_compared_and_timed(capsys) -> None:
    passages = tuple(f"passage {number} is about item {number}. " * 3 for number in range(3))
    question = Question("which item is it?", ("item 1",), passages)
    options = Namespace(passages=3, ignore_eos=True)
    model = tiny_model("llama", max_position_embeddings=2048)
    with make_engine(model, reuse_moved="always") as engine:
        rows = [verified.ask(engine, question, n, options, number=n) for n in (3, 4)]
    kept = io.StringIO()
    verified.keep(rows[0], kept)
    assert json.loads(kept.getvalue()) == rows[0]
    assert all(row["moved_tokens"] > 64 and row["same"] and row["plain_same"] for row in rows)
    assert set(rows[0]["milliseconds"]) == set(verified.WAYS)
    (found,) = verified.report(rows, [4, 5])  # none of five tokens
    assert (found["questions"], found["same_as_baseline"]) == (1, 1)
    printed = capsys.readouterr().out
    assert "1 verified answers equal baseline's" in printed
    assert f"median: {found['verified_to_plain']:.2f}; " in printed
    assert f"mean: {found['drafted_tokens']:.0f} verified " in printed
