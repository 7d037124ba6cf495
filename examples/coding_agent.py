"""A coding agent that reads files with a tool, and whose old results the server clears.

Start a server, then run this:

    kvboost serve
    python examples/coding_agent.py examples/*.py

You ask about one file after another. For each question the model calls a tool that reads the file,
and answers. The agent keeps and sends the whole history. Once that has more than ``--trigger``
tokens, the server clears all results but the last ``--keep`` before the model reads it.

Each line is one question, over all of its requests: how many results were cleared, how many rows
the prompts had and where they came from, and how long the first tokens took. To see the same with a
prefix cache only, or without any reuse: ``--mode prefix_cache`` and ``--mode baseline``.

Needs ``openai``.
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from openai import OpenAI

INSTRUCTION = "You are a coding agent. Read a file before you answer, and answer briefly."
COLUMNS = ("cleared", "rows", "exact", "approximate", "moved", "computed")


def read_file_tool(names: list[str]) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {"path": {"type": "string", "enum": names}},
        "required": ["path"],
        "additionalProperties": False,
    }
    described = {"description": "Read a file of the project", "parameters": parameters}
    return {"type": "function", "function": {"name": "read_file", "strict": True, **described}}


class Agent:
    """A conversation about files. ``request`` is what all of its requests have in common."""

    def __init__(self, client: OpenAI, files: dict[str, str], **request: Any) -> None:
        self._client, self._files, self._request = client, files, request
        self._messages: list[Any] = [{"role": "system", "content": INSTRUCTION}]
        self.used: Counter[str] = Counter()

    def ask(self, question: str) -> str:
        """The answer, after as many calls of the tool as the model makes, but at most three."""
        self._messages.append({"role": "user", "content": question})
        for choice in ("required", "auto", "auto"):  # small models call no tool unless they must
            message = self._next_message(choice)
            for call in message.tool_calls or ():
                text = self._files[json.loads(call.function.arguments)["path"]]
                result = {"role": "tool", "tool_call_id": call.id, "content": text}
                self._messages.append(result)
            if not message.tool_calls:
                break
        return message.content or ""

    def _next_message(self, choice: str) -> Any:
        answer = self._client.chat.completions.create(
            messages=self._messages, tool_choice=choice, **self._request
        )
        message = answer.choices[0].message
        self._messages.append(message.model_dump(exclude_none=True))
        self._note(answer)
        return message

    def _note(self, answer: Any) -> None:
        report, repaired = answer.kvboost, answer.kvboost["recomputed_tokens"]
        self.used["rows"] += answer.usage.prompt_tokens
        self.used["exact"] += report["exact_tokens"]
        self.used["approximate"] += report["approximate_tokens"]
        self.used["moved"] += report["moved_tokens"] - repaired
        self.used["computed"] += report["computed_tokens"] + repaired
        self.used["ttft_ms"] += report["ttft_ms"]
        for edit in answer.context_management["applied_edits"]:
            self.used["cleared"] = edit["cleared_tool_uses"]


def line(title: str, used: Counter[str]) -> str:
    numbers = "".join(f"{used[name]:12,}" for name in COLUMNS)
    return f"{title:20}{numbers}{used['ttft_ms'] / 1000:11.1f} s"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="none")
    modes = ("chunk_kv_reuse", "prefix_cache", "baseline")
    parser.add_argument("--mode", default=modes[0], choices=modes)
    parser.add_argument("--trigger", type=int, default=3_000, help="tokens before results go")
    parser.add_argument("--keep", type=int, default=3, help="results that stay")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args(arguments)
    files = {path.name: path.read_text()[:6_000] for path in options.files}
    client = OpenAI(base_url=options.url, api_key=options.key, timeout=900, max_retries=0)
    clear = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": options.trigger},
        "keep": {"type": "tool_uses", "value": options.keep},
    }
    agent = Agent(
        client,
        files,
        model=client.models.list().data[0].id,
        tools=[read_file_tool(list(files))],
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=options.max_tokens,
        extra_body={
            "context_management": {"edits": [clear]},
            "kvboost": {"mode": options.mode},
            "cache_salt": str(uuid.uuid4()),  # a cache of its own: each run begins without text
        },
    )
    total: Counter[str] = Counter()
    print(" " * 20 + "".join(f"{name:>12}" for name in COLUMNS) + f"{'first token':>13}")
    for name in files:
        answer = agent.ask(f"What does {name} do?")
        print(line(name, agent.used))
        total.update(agent.used)
        total["cleared"] = agent.used["cleared"]
        agent.used.clear()
    print(line("all", total))
    print(f"the last answer: {' '.join(answer.split())}")


if __name__ == "__main__":
    main()
