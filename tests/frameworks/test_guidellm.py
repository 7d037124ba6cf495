"""guidellm, which measures servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.questions import passages


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_answers_have_the_length_that_was_asked_for(
    server, model_folder, knows_every_field, has_run, tmp_path, route
) -> None:
    """The lengths differ, so an answer that ends at its end token, or at another limit, shows."""
    data, report = tmp_path / "data.jsonl", tmp_path / "report.json"
    wanted = [4 + 6 * number for number in range(6)]
    rows = [
        {"prompt": f"{text}\n\nSay this in one sentence.", "output_tokens_count": length}
        for text, length in zip(passages(len(wanted)), wanted, strict=True)
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    backend = f"kind=openai_http,target={server.root},model={server.model},request_format={route}"
    run_guidellm(
        *("--backend", backend),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={len(rows)}"),
        *("--data", f"kind=json_file,path={data}"),
        *("--tokenizer", f"kind=hf_auto,model={model_folder}"),
        *("--output", f"kind=json,path={report}"),
    )
    (measured,) = json.loads(report.read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    answers = measured["requests"]["successful"]
    assert sorted(answer["output_metrics"]["text_tokens"] for answer in answers) == wanted
    assert all(answer["output"] and answer["input_metrics"]["text_tokens"] for answer in answers)
    has_run("guidellm", f"`{route}` with a data set, two streams, fixed lengths")


def run_guidellm(*arguments: str) -> None:
    program = Path(sys.executable).with_name("guidellm")
    done = subprocess.run(
        [program, "run", "--disable-console-interactive", *arguments],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
