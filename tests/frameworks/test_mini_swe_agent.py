"""mini-swe-agent, a coding agent, as its command runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.questions import DOCS

STEPS, TRIGGER = 5, 3
COMMAND = "head -n 16 server.md && sed -i 1,16d server.md"
"""Shows the next lines of a page: at each step another text."""
BASH = {
    "name": "bash",
    "description": "Execute a bash command",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": [COMMAND]}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
EDIT = {
    "type": "clear_tool_uses_20250919",
    "trigger": {"type": "tool_uses", "value": TRIGGER},
    "keep": {"type": "tool_uses", "value": 2},
}


def test_an_agent_works_in_steps_and_old_outputs_are_cleared(
    server, knows_every_field, has_run, tmp_path
) -> None:
    """The embedded model is too small for the agent's task. The tool that its configuration puts in
    the place of the agent's own allows one command, so the model writes that."""
    shutil.copy(DOCS / "server.md", tmp_path)
    done, told = run(
        tmp_path,
        server.model,
        api_base=server.url,
        api_key="none",
        temperature=0,
        max_tokens=64,
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body={
            "tools": [{"type": "function", "function": BASH}],
            "context_management": {"edits": [EDIT]},
            "kvboost": {"strategy": "query"},  # moves text not only where it pays
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert told["info"]["exit_status"] == "LimitsExceeded"  # it never says that it is done
    asked = [one for one in told["messages"] if one["role"] == "assistant"]
    results = [one["extra"]["raw_output"] for one in told["messages"] if one["role"] == "tool"]
    assert [one["extra"]["actions"][0]["command"] for one in asked] == [COMMAND] * STEPS
    assert (DOCS / "server.md").read_text().startswith("".join(results))  # its history is whole
    answers = [one["extra"]["response"] for one in asked]
    cleared = [
        sum(edit["cleared_tool_uses"] for edit in answer["context_management"]["applied_edits"])
        for answer in answers
    ]
    assert cleared == [0, 0, 0, 0, 2]
    first, second = (answer["usage"] for answer in answers[:2])
    reused = second["prompt_tokens_details"]["cached_tokens"]
    assert reused > 0.9 * first["prompt_tokens"]  # the first step is not read again
    reports = [answer["kvboost"] for answer in answers]
    moved = [one["moved_tokens"] - one["recomputed_tokens"] for one in reports]
    assert max(moved[:-1]) < 200 < moved[-1]
    has_run("mini-swe-agent", "`mini --yolo`, five steps; context editing, moved text")


def run(
    folder: Path, model: str, **settings: Any
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Runs the agent in ``folder``; returns how it ended and what it has written down."""
    configuration, trajectory = folder / "local.yaml", folder / "trajectory.json"
    chosen = {"cost_tracking": "ignore_errors", "model_kwargs": settings}
    written = {"agent": {"step_limit": STEPS}, "model": chosen}
    configuration.write_text(json.dumps(written))  # JSON is YAML
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("mini"), "--yolo", "--exit-immediately"),
            *("--config", "mini.yaml", "--config", configuration, "--output", trajectory),
            *("--model", f"openai/{model}", "--task", "Read server.md."),
        ],
        env={
            **os.environ,
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "settings"),
            "LITELLM_LOCAL_MODEL_COST_MAP": "true",  # else it asks the network for prices
        },
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done, json.loads(trajectory.read_text()) if trajectory.exists() else {}
