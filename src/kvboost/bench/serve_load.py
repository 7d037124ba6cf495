"""Users who talk to a server over HTTP, and the clock beside them.

The clock is the client's: it starts before a request is sent, and every piece of text is stamped
when its line has arrived. Closed loop: a user sends the next request when the last is answered.
Open loop: requests are sent at times drawn beforehand, however the server is doing.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from kvboost.bench.serve_work import Message, Request

OnAnswer = Callable[[], None]


@dataclass(frozen=True)
class Server:
    """Where requests go and what they say beside their messages."""

    url: str
    model: str
    max_tokens: int
    logit_bias: Mapping[str, int] = field(default_factory=dict)
    """Keeps the model from ending early: -100 for each of its special tokens."""
    timeout: float = 600.0
    """Seconds without a word after which a request has failed."""
    seconds: float = math.inf
    """Nothing is sent later than this after a load has begun."""

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "logit_bias": dict(self.logit_bias),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass
class Answer:
    """One request and what came of it. Times are in seconds; ``sent_s`` since the load began."""

    kind: str
    user: int
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
    """As the server says it: of the prompt, not computed."""
    moved_tokens: int = 0
    """Ours only: also not computed, but reused from another place."""
    error: str | None = None


def data_of(line: str) -> str | None:
    """What a line of an event stream carries; None for comments, other fields and blank lines."""
    name, colon, value = line.partition(":")
    return value.removeprefix(" ") if colon and name == "data" else None


def read_event(data: str, answer: Answer) -> str:
    """Notes what a chunk says about the request; gives its text, often none."""
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
    pieces = [choice.get("delta", {}).get("content") or "" for choice in chunk.get("choices", ())]
    return "".join(pieces)


async def ask(
    client: httpx.AsyncClient, server: Server, messages: Sequence[Message], answer: Answer
) -> None:
    """Sends one request and fills in ``answer``. Whatever goes wrong is its error."""
    content = json.dumps(server.body(messages)).encode()
    headers = {"content-type": "application/json"}
    pieces: list[str] = []
    start = last = time.perf_counter()
    try:
        async with client.stream(
            "POST", f"{server.url}/v1/chat/completions", content=content, headers=headers
        ) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                raise ValueError(f"HTTP {response.status_code}: {said[:300]}")
            done = False
            async for line in response.aiter_lines():
                now = time.perf_counter()
                data = data_of(line)
                if data is None or done:
                    continue
                if data == "[DONE]":
                    done = True
                    continue
                if text := read_event(data, answer):
                    if pieces:
                        answer.gaps_s.append(now - last)
                    else:
                        answer.ttft_s = now - start
                    pieces.append(text)
                    last = now
            if answer.error is None and not done:
                answer.error = "the stream ended without [DONE]"
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.total_s = time.perf_counter() - start
    answer.text = "".join(pieces)
    if answer.error is None and answer.ttft_s is None:
        answer.error = "no text came"


class User:
    """Someone with a conversation: remembers what was said."""

    def __init__(self, number: int, client: httpx.AsyncClient, server: Server) -> None:
        self._number = number
        self._client = client
        self._server = server
        self._said: list[Message] = []

    async def send(self, request: Request, since: float) -> Answer:
        if not request.continues:
            self._said = []
        messages = [*self._said, *request.messages]
        answer = Answer(request.kind, self._number, time.perf_counter() - since)
        await ask(self._client, self._server, messages, answer)
        self._said = [*messages, {"role": "assistant", "content": answer.text}]
        return answer


async def closed_loop(
    server: Server, users: Sequence[Sequence[Request]], on_answer: OnAnswer = lambda: None
) -> list[Answer]:
    """Every user at once, each waiting for an answer before the next request."""
    async with _client(server, len(users)) as client:
        since = time.perf_counter()

        async def talk(number: int, requests: Sequence[Request]) -> list[Answer]:
            user, answers = User(number, client, server), []
            for request in requests:
                if time.perf_counter() - since > server.seconds:
                    break
                answers.append(await user.send(request, since))
                on_answer()
            return answers

        talks = [talk(number, requests) for number, requests in enumerate(users)]
        return [answer for answers in await asyncio.gather(*talks) for answer in answers]


def arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Seconds at which a Poisson process of ``rate`` per second has its first events; the first
    is at 0."""
    rng = random.Random(f"arrivals {seed}")
    times = [0.0]
    while len(times) < number:
        times.append(times[-1] + rng.expovariate(rate))
    return times[:number]


async def open_loop(
    server: Server,
    users: Sequence[Sequence[Request]],
    rate: float,
    seed: int,
    on_answer: OnAnswer = lambda: None,
) -> list[Answer]:
    """The users' requests in turn, at drawn times. Only a request that continues a conversation
    waits for the answer before it; its clock starts when it is sent."""
    longest = max(map(len, users))
    order = [
        (number, requests[turn])
        for turn in range(longest)
        for number, requests in enumerate(users)
        if turn < len(requests)
    ]
    async with _client(server, len(order)) as client:
        people: dict[int, User] = {}
        before: dict[int, asyncio.Task[Answer]] = {}
        since = time.perf_counter()

        async def send(user: User, request: Request, after: asyncio.Task[Answer] | None) -> Answer:
            if after is not None:
                await after
            answer = await user.send(request, since)
            on_answer()
            return answer

        tasks = []
        times = arrivals(len(order), rate, seed)
        for at, (number, request) in zip(times, order, strict=True):
            if at > server.seconds:
                break
            await asyncio.sleep(max(0.0, since + at - time.perf_counter()))
            if not request.continues:
                people[number] = User(number, client, server)
            after = before[number] if request.continues else None
            before[number] = asyncio.create_task(send(people[number], request, after))
            tasks.append(before[number])
        return list(await asyncio.gather(*tasks))


def _client(server: Server, connections: int) -> httpx.AsyncClient:
    """Straight to the server, a connection per request: one kept alive may end at any moment."""
    return httpx.AsyncClient(
        timeout=server.timeout,
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0),
        trust_env=False,
    )
