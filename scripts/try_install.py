"""Uses an installed kvboost as a newcomer does: the command line, the demo, and the server with
OpenAI's client.

    python try_install.py

Needs ``kvboost[serve]`` and ``openai`` in the environment of the Python that runs it, and nothing
of the clone. Fails if the demo's answers change with reuse, or if the server reads a text twice.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
from openai.types import CompletionUsage

import kvboost

KVBOOST = str(Path(sys.executable).parent / "kvboost")
MODEL = "smollm2-135m"
TEXT = (
    "The lighthouse at Corran Point was built in 1874. Its keeper, Ishbel Grant, wrote down the "
    "weather every six hours for thirty-one years, and her books are still in the harbour office. "
    "The lamp burned paraffin until 1936, when a cable was laid from the mainland. Fishermen "
    "complained that the new electric light was too white to be seen in fog. "
)


def main() -> None:
    place = Path(kvboost.__file__).resolve()
    assert place.is_relative_to(Path(sys.prefix).resolve()), f"{place} is not in {sys.prefix}"
    for arguments in (["--version"], ["doctor"]):
        print(f"$ kvboost {arguments[0]}", flush=True)
        subprocess.run([KVBOOST, *arguments], check=True)
    try_demo()
    with server() as url, openai.OpenAI(base_url=url, api_key="none") as client:
        try_server(client)


def try_demo() -> None:
    print("$ kvboost demo --quick", flush=True)
    command = [KVBOOST, "demo", "--quick", "--json"]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    exact = [one for one in json.loads(shown.stdout) if one["mean_kl"] is None]
    assert exact and all(one["same"] for one in exact), "answers change with reuse"
    assert exact[-1]["reuse"]["kv_reuse_ratio"] > 0.9, "the code file was read again"


@contextmanager
def server() -> Iterator[str]:
    """The address of a server on a free port."""
    print("$ kvboost serve", flush=True)
    command = [KVBOOST, "serve", "--port", "0", "--model", MODEL]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"}
    ) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://"), f"the server did not start: {url!r}"
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=120)
    assert process.returncode == 0, f"the server ended with {process.returncode}"


def try_server(client: openai.OpenAI) -> None:
    """Two chats about one text, and a third as a stream. The second and third reuse the text."""
    first, second = (ask(client, question) for question in ("Who kept it?", "When was it built?"))
    pieces: list[str] = []
    streamed = None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{TEXT}\n\nWhat did the lamp burn?"}],
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        streamed = chunk.usage or streamed
    assert len(pieces) > 1 and "".join(pieces).strip(), "the stream had no text"
    assert streamed is not None, "the stream had no usage"
    print(f"stream: {''.join(pieces)!r}")
    shares = [reused(usage) for usage in (first, second, streamed)]
    print("reused of each prompt: " + ", ".join(f"{share:.0%}" for share in shares), flush=True)
    assert shares[1] > 0.5 and shares[2] > 0.5, f"the text was read again: {shares}"


def ask(client: openai.OpenAI, question: str) -> CompletionUsage:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{TEXT}\n\n{question}"}],
        max_tokens=12,
        temperature=0,
    )
    text = answer.choices[0].message.content
    assert text and text.strip(), "the answer is empty"
    assert answer.usage is not None
    print(f"chat: {text!r}")
    return answer.usage


def reused(usage: CompletionUsage) -> float:
    details = usage.prompt_tokens_details
    return (details.cached_tokens or 0 if details else 0) / usage.prompt_tokens


if __name__ == "__main__":
    main()
