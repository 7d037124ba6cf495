"""Users who talk to a server over HTTP, each waiting for an answer before the next request.

The clock is the client's. It starts before a request is sent, and every piece of text is stamped
when its line has arrived.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvboost.bench.serve.connection import Connection
from kvboost.bench.serve.users import Message, Request

OnAnswer = Callable[[], None]
NO_TEXT = "no text came"
SOURCES = ("exact", "approximate", "moved", "recomputed", "computed")
"""Where our server says that the rows of a prompt come from; moved rows include recomputed ones."""


@dataclass(frozen=True)
class Target:
    """Where requests go, and what they say besides their messages."""

    url: str
    model: str
    max_tokens: int
    logit_bias: Mapping[str, int] = field(default_factory=dict)
    """Keeps the model from ending early: -100 for each of its special tokens."""
    timeout: float = 600.0
    """A request fails after so many seconds."""
    seconds: float = math.inf
    """Nothing is sent later than this after the load began."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of the bodies."""

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logit_bias": dict(self.logit_bias),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.more,
        }


@dataclass
class Answer:
    """One request and its outcome. Times are in seconds; ``sent_s`` since the load began."""

    sent_s: float
    total_s: float = 0.0
    ttft_s: float | None = None
    """None if no text came."""
    gaps_s: list[float] = field(default_factory=list)
    """Between one piece of text and the next."""
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were not computed, as the server reports them."""
    moved_tokens: int = 0
    """Ours only: those of them that were reused from another place."""
    server_ttft_s: float | None = None
    """Ours only: the first token by the server's clock, from the complete request on."""
    rows: dict[str, int] = field(default_factory=dict)
    """Ours only: the prompt's rows by source."""
    first_logprobs: dict[str, float] = field(default_factory=dict)
    """The likeliest first tokens and their log probabilities, if a completion asked for them."""
    error: str | None = None


def data_of(line: bytes) -> bytes | None:
    """The data of a line of an event stream; None for comments, other fields and blank lines."""
    return line[5:].strip() if line.startswith(b"data:") else None


def read_event(data: bytes, answer: Answer) -> str:
    """Notes what a chunk says about the request; returns its text, which is often empty."""
    chunk = json.loads(data)
    if error := chunk.get("error"):
        answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
        return ""
    if usage := chunk.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        answer.cached_tokens = details.get("cached_tokens") or 0
    if ours := chunk.get("kvboost"):
        reused = ours["approximate_tokens"] + ours["moved_tokens"]
        answer.moved_tokens = reused - ours["recomputed_tokens"]
        answer.rows = {name: ours.get(f"{name}_tokens", 0) for name in SOURCES}
        answer.server_ttft_s = ours["ttft_ms"] / 1e3
    choices = chunk.get("choices", ())
    for choice in choices:
        top = (choice.get("logprobs") or {}).get("top_logprobs")
        answer.first_logprobs = answer.first_logprobs or (top[0] if top else {})
    return "".join(_text(choice) for choice in choices)


def _text(choice: Mapping[str, Any]) -> str:
    """The text of a choice of a chunk: of a chat in its ``delta``, of a completion as ``text``."""
    return choice.get("delta", choice).get("content" if "delta" in choice else "text") or ""


async def ask(
    connection: Connection, target: Target, messages: Sequence[Message], answer: Answer
) -> None:
    """Sends one chat request and fills in ``answer``. A failure becomes its ``error``."""
    await send(connection, "/v1/chat/completions", target.body(messages), target.timeout, answer)


async def send(
    connection: Connection, path: str, asked: Mapping[str, Any], timeout: float, answer: Answer
) -> None:
    """Sends ``asked``, whose answer is streamed, and fills in ``answer``. A failure becomes its
    ``error``."""
    body = json.dumps(asked).encode()
    pieces: list[str] = []
    start = time.perf_counter()

    async def read() -> None:
        last, done = start, False
        async for line in connection.lines("POST", path, body):
            now = time.perf_counter()
            data = data_of(line)
            if data is None or done:
                continue
            if data == b"[DONE]":
                done = True
            elif text := read_event(data, answer):
                if pieces:
                    answer.gaps_s.append(now - last)
                else:
                    answer.ttft_s = now - start
                pieces.append(text)
                last = now
        if answer.error is None and not done:
            answer.error = "the stream ended without [DONE]"

    try:
        await asyncio.wait_for(read(), timeout)
    except TimeoutError:
        answer.error = f"no whole answer within {timeout:g} s"
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_s = time.perf_counter() - start
    answer.text = "".join(pieces)
    if answer.error is None and answer.ttft_s is None:
        answer.error = NO_TEXT


async def closed_loop(
    target: Target,
    users: Sequence[Sequence[Request]],
    on_answer: OnAnswer = lambda: None,
    *,
    since: float | None = None,
) -> list[Answer]:
    """All users at once; each waits for an answer before its next request. The load began at
    ``since``, by ``time.perf_counter``, which all processes of a machine share; now, if not
    given."""
    begun = time.perf_counter() if since is None else since

    async def talk(requests: Sequence[Request]) -> list[Answer]:
        answers: list[Answer] = []
        said: list[Message] = []
        connection = Connection(target.url)
        for request in requests:
            sent = time.perf_counter() - begun
            if sent > target.seconds:
                break
            messages = [*(said if request.continues else ()), *request.messages]
            answers.append(Answer(sent))
            await ask(connection, target, messages, answers[-1])
            said = [*messages, {"role": "assistant", "content": answers[-1].text}]
            on_answer()
        connection.close()
        return answers

    talks = await asyncio.gather(*map(talk, users))
    return [answer for answers in talks for answer in answers]
