"""More requests than a server can answer: chats, schemas, tools, /v1/responses and /v1/messages.

The crowd asks again as soon as it has an answer. There are twice as many clients as the server runs
and lets wait, and some hang up or send what is wrong. Every request must be answered, or refused
with 429 or 503 and Retry-After. An answer must keep to its schema, and a greedy one must be what
the idle server answered before. A light user with a key of its own asks for a short answer now and
then: it must never be refused, and wait no longer than the crowd does. Afterwards the server must
hold no KV, no more open files than before, and its memory must be back at its level.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx
import jsonschema_rs

from benchmarks.soak import MOST_GROWTH, levels, resident_mb
from kvboost.bench.kit import benchmark
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import KVBoostServer
from kvboost.bench.peers.setting import Setting, prepare
from kvboost.bench.serve.clients import data_of
from kvboost.bench.serve.connection import KEPT_SECONDS
from kvboost.bench.texts.prompts import docstrings
from kvboost.config import DEFAULT_MODEL

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
OPERATOR, CROWD, LIGHT = "operator-key", "crowd-key", "light-key"
KEYS = (f"admin:operator:{OPERATOR}", f"crowd:{CROWD}", f"light:{LIGHT}")
MAX_RUNNING, MAX_WAITING = 8, 8
CACHE_BYTES = 256 * 1024**2
"""Soon full, so that memory does not grow because the cache fills."""
TEXTS = 6
TEXT_CHARACTERS = 1200
MAX_TOKENS = 128
REST_SECONDS = 120.0
REFUSALS = (429, 503)
MORE_FILES = 4
"""Files and connections that the server may have open at rest beside those before."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "kind": {"enum": ["module", "class", "function"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}
NAME, TOLD = "note", "Makes a note of a text."
UNKEPT: dict[str, Any] = {"type": "object", "not": {"type": "string"}}
"""A schema that cannot be honoured, and is refused."""


@dataclass(frozen=True, kw_only=True)
class Settings(benchmark.Settings):
    QUICK: ClassVar = {"minutes": 0.5}

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    minutes: float = option(5.0, "How long the crowd asks.", least=0.1)


@dataclass(frozen=True)
class Request:
    """One thing to ask. ``said`` reads its answer: the text, and whether that is complete;
    ``joined`` reads the events of a stream."""

    kind: str
    path: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.path} {json.dumps(self.body, sort_keys=True)}"

    @property
    def schema(self) -> dict[str, Any] | None:
        return SCHEMA if self.kind.endswith(("schema", "tools")) else None

    def said(self, answer: dict[str, Any]) -> tuple[str, bool]:
        return READERS[self.path][0](answer)

    def joined(self, events: Sequence[dict[str, Any]]) -> tuple[str, bool]:
        return READERS[self.path][1](events)


def make_requests(model: str, texts: Iterable[str], max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Every kind over every text."""
    made = []
    greedy: dict[str, Any] = {"model": model, "temperature": 0}
    for text in texts:
        said = [{"role": "user", "content": f"{text}\n\nDescribe this."}]
        chat = {**greedy, "messages": said, "max_tokens": max_tokens}
        reply = {**greedy, "input": said, "max_output_tokens": max_tokens}
        held = {"name": NAME, "schema": SCHEMA, "strict": True}
        function = {"name": NAME, "description": TOLD, "parameters": SCHEMA, "strict": True}
        tool = {"name": NAME, "description": TOLD, "input_schema": SCHEMA}
        whole, short = {"type": "json_schema", "json_schema": held}, max_tokens // 8
        plain, forced = {"type": "json_schema", **held}, {"tool_choice": "required"}
        nested, flat = ({"type": "function", **one} for one in ({"function": function}, function))
        asked = {
            "chat": (CHAT, chat | {"max_tokens": short}),
            "schema": (CHAT, chat | {"response_format": whole}),
            "choice": (CHAT, chat | {"guided_choice": ["a module", "a class"]}),
            "tools": (CHAT, chat | forced | {"tools": [nested]}),
            "responses": (RESPONSES, reply | {"max_output_tokens": short}),
            "responses, schema": (RESPONSES, reply | {"text": {"format": plain}}),
            "responses, tools": (RESPONSES, reply | forced | {"tools": [flat]}),
            "messages": (MESSAGES, chat | {"max_tokens": short}),
            "messages, tools": (MESSAGES, chat | {"tools": [tool], "tool_choice": {"type": "any"}}),
        }
        made += [Request(kind, path, body) for kind, (path, body) in asked.items()]
    return made


def _chat_said(answer: dict[str, Any]) -> tuple[str, bool]:
    (choice,) = answer["choices"]
    calls = choice["message"].get("tool_calls") or ()
    text = "".join(one["function"]["arguments"] for one in calls)
    said = choice["message"]["content"] or ""
    return said + text, choice["finish_reason"] != "length"


def _chat_joined(events: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    said, text = "", ""
    ends: list[str | None] = []
    for choice in (choice for one in events for choice in one["choices"]):
        delta = choice["delta"]
        calls = delta.get("tool_calls") or ()
        said += delta.get("content") or ""
        text += "".join(one["function"].get("arguments") or "" for one in calls)
        ends += filter(None, [choice.get("finish_reason")])
    (end,) = ends
    return said + text, end != "length"


def _response_said(answer: dict[str, Any]) -> tuple[str, bool]:
    parts = [part["text"] for item in answer["output"] for part in item.get("content", ())]
    parts += [item["arguments"] for item in answer["output"] if item["type"] == "function_call"]
    return "".join(parts), answer["status"] == "completed"


def _response_joined(events: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    return _response_said(events[-1]["response"])


def _message_said(answer: dict[str, Any]) -> tuple[str, bool]:
    is_whole = answer["stop_reason"] != "max_tokens"
    used = [one["input"] for one in answer["content"] if one["type"] == "tool_use"]
    text = "".join(one["text"] for one in answer["content"] if one["type"] == "text")
    return json.dumps(used[0]) if used and is_whole else text, is_whole


def _message_joined(events: Sequence[dict[str, Any]]) -> tuple[str, bool]:
    deltas = [one["delta"] for one in events if one["type"] == "content_block_delta"]
    (end,) = (one["delta"]["stop_reason"] for one in events if one["type"] == "message_delta")
    assert events[-1]["type"] == "message_stop"
    calls = "".join(one.get("partial_json", "") for one in deltas)
    text = "".join(one.get("text", "") for one in deltas)
    is_whole = end != "max_tokens"
    return json.dumps(json.loads(calls)) if calls and is_whole else text, is_whole


READERS: dict[str, tuple[Callable[..., tuple[str, bool]], Callable[..., tuple[str, bool]]]] = {
    CHAT: (_chat_said, _chat_joined),
    RESPONSES: (_response_said, _response_joined),
    MESSAGES: (_message_said, _message_joined),
}


@dataclass
class Seen:
    """The outcomes. ``problems`` is empty when all went well."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    """Answers that were held against those of the idle server."""
    validated: int = 0
    """Those that were complete and had a schema."""
    memory_mb: list[float] = field(default_factory=list)
    """Levels without the KV of running requests, from a tenth of the time on; the last is at
    rest."""
    open_files: tuple[int, int] = (0, 0)
    """Of the server, before and at rest afterwards."""
    seconds: dict[str, list[float]] = field(default_factory=dict)
    """The seconds of short answers: those of the light user while nothing else ran and beside the
    crowd, and those of the crowd."""
    finished: dict[str, int] = field(default_factory=dict)

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.problems.append(otherwise)

    def took(self, who: str, seconds: float) -> None:
        self.seconds.setdefault(who, []).append(seconds)


def wrong_bodies(request: Request) -> list[dict[str, Any]]:
    """Bodies that must be refused with 400."""
    held = {"type": "json_schema", "json_schema": {"name": NAME, "schema": UNKEPT}}
    unkept = {"response_format": held, "text": {"format": held}}
    if request.path == MESSAGES or request.kind == "tools":
        unkept = {"temperature": "hot"}  # a format is ignored there
    return [request.body | {"tools": [{}]}, request.body | unkept]


def open_client(url: str, headers: Mapping[str, str]) -> httpx.AsyncClient:
    """A client that keeps its connections, as OpenAI's does, and goes straight to the server. It
    closes an idle connection before a server would, so that no request meets one that ends."""
    return httpx.AsyncClient(
        base_url=url,
        headers=headers,
        timeout=600,
        limits=httpx.Limits(keepalive_expiry=KEPT_SECONDS),
        trust_env=False,
        verify=False,  # all servers speak HTTP; certificates would only be loaded
    )


class Clients:
    """Clients of one server."""

    def __init__(self, server: Running, requests: Sequence[Request], seen: Seen) -> None:
        self._requests = requests
        self._seen = seen
        self._answers: dict[str, str] = {}
        """Of the idle server, by request."""
        self._client = open_client(server.url, {"x-api-key": CROWD})

    async def close(self) -> None:
        await self._client.aclose()

    async def learn(self) -> None:
        """Asks everything once, one after the other."""
        for request in self._requests:
            response = await self._client.post(request.path, json=request.body)
            response.raise_for_status()
            self._answers[request.key] = request.said(response.json())[0]
        for _ in range(3):
            await self._ask_lightly("light, idle", self._requests[0])

    async def ask_lightly(self, goes_on: Callable[[], bool]) -> None:
        """The light user: rests as long as each answer has taken."""
        short = [request for request in self._requests if request.kind == "chat"]
        rng = random.Random(0)
        while goes_on():
            await asyncio.sleep(await self._ask_lightly("light", rng.choice(short)))

    async def _ask_lightly(self, who: str, request: Request) -> float:
        began = time.monotonic()
        response = await self._client.post(
            request.path, json=request.body, headers={"x-api-key": LIGHT}
        )
        if response.status_code == 200:
            self._seen.took(who, time.monotonic() - began)
            self._judge(request, *request.said(response.json()))
        else:
            self._seen.problems.append(f"{who}: HTTP {response.status_code}: {response.text[:200]}")
        self._seen.outcomes[f"answered: {who}"] += 1
        return time.monotonic() - began

    async def talk(self, seed: int, goes_on: Callable[[], bool], pause: float) -> None:
        """One client: asks as long as it ``goes_on``, and waits ``pause`` seconds when refused."""
        rng = random.Random(seed)
        kinds = {self._ask: 5, self._stream: 4, self._leave: 2, self._send_wrong: 1}
        while goes_on():
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            request = rng.choice(self._requests)
            try:
                outcome = await kind(request, rng)
            except Exception as error:
                outcome = f"{kind.__name__.strip('_')} {type(error).__name__}"
                self._seen.problems.append(f"{request.kind}, {outcome}: {error}")
            self._seen.outcomes[outcome] += 1
            if outcome == "refused":
                await asyncio.sleep(pause)

    async def _ask(self, request: Request, rng: random.Random) -> str:
        began = time.monotonic()
        response = await self._client.post(request.path, json=request.body)
        if response.status_code != 200:
            return self._refused(response)
        if request.kind == "chat":
            self._seen.took("crowd", time.monotonic() - began)
        self._judge(request, *request.said(response.json()))
        return f"answered: {request.kind}"

    async def _stream(self, request: Request, rng: random.Random) -> str:
        body = request.body | {"stream": True}
        async with self._client.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            found = [data_of(line.encode()) async for line in response.aiter_lines()]
        events = [json.loads(data) for data in found if data and data != b"[DONE]"]
        self._judge(request, *request.joined(events))
        return f"streamed: {request.kind}"

    async def _leave(self, request: Request, rng: random.Random) -> str:
        """Hangs up after some lines."""
        left = rng.randrange(8)
        body = request.body | {"stream": True, "temperature": 0.9}
        async with self._client.stream("POST", request.path, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break
        return "left"

    async def _send_wrong(self, request: Request, rng: random.Random) -> str:
        whole = json.dumps(request.body)
        cut_off = whole[: rng.randrange(1, len(whole))]
        content = rng.choice([cut_off, *map(json.dumps, wrong_bodies(request))])
        response = await self._client.post(
            request.path, content=content, headers={"content-type": "application/json"}
        )
        code = response.status_code
        self._seen.expect(code == 400, f"{request.kind}, wrong: {code}: {response.text[:200]}")
        return "wrong: 400"

    def _judge(self, request: Request, text: str, is_whole: bool) -> None:
        known = self._answers[request.key]
        self._seen.compared += 1
        self._seen.expect(text == known, f"{request.kind}: {text!r} instead of {known!r}")
        if request.schema is not None and is_whole:
            self._seen.validated += 1
            is_valid = jsonschema_rs.is_valid(request.schema, json.loads(text))
            self._seen.expect(is_valid, f"{request.kind}: {text!r} does not keep to its schema")

    def _refused(self, response: httpx.Response) -> str:
        code, after = response.status_code, response.headers.get("retry-after", "")
        is_right = code in REFUSALS and after.isdigit()
        self._seen.expect(is_right, f"HTTP {code}, Retry-After {after!r}: {response.text[:200]}")
        return "refused"

    async def serving(self) -> dict[str, Any]:
        asked = await self._client.get("/kvboost/cache?limit=1", headers={"x-api-key": OPERATOR})
        said = asked.json()
        held = said["serving"]["kv_bytes"] + said["stats"]["idle_kv_bytes"]
        return {**said["serving"], "held_mb": held / 1e6}


async def overload(
    server: Running,
    requests: Sequence[Request],
    *,
    clients: int,
    seconds: float,
    least: int = 0,
    pause: float = 0.2,
) -> Seen:
    """``clients`` clients for ``seconds`` seconds, longer until ``least`` were compared."""
    seen = Seen()
    there = Clients(server, requests, seen)
    memory: list[float] = []
    await there.learn()
    files = open_files(server.pid)
    start = time.monotonic()

    def goes_on() -> bool:
        return time.monotonic() - start < seconds or seen.compared < least

    async def watch() -> None:
        while goes_on():
            await asyncio.sleep(min(1.0, seconds / 20))
            if time.monotonic() - start > seconds / 10:
                memory.append(resident_mb(server.pid) - (await there.serving())["held_mb"])

    talks = (there.talk(number, goes_on, pause) for number in range(clients))
    await asyncio.gather(watch(), there.ask_lightly(goes_on), *talks)
    await _check_rest(there, seen)
    at_rest = resident_mb(server.pid) - (await there.serving())["held_mb"]
    seen.memory_mb = [*levels(memory), at_rest]
    await there.close()
    seen.open_files = (files, open_files(server.pid))
    return seen


def open_files(pid: int) -> int:
    """The number of files and connections that a process has open."""
    return len(os.listdir(f"/proc/{pid}/fd"))


async def _check_rest(there: Clients, seen: Seen) -> None:
    """Notes what the idle server still holds."""
    deadline = time.monotonic() + REST_SECONDS
    while True:
        now = await there.serving()
        if not now["running"] and not now["waiting"]:
            break
        if time.monotonic() > deadline:
            seen.problems.append(f"{now['running']} run and {now['waiting']} wait at rest")
            break
        await asyncio.sleep(0.05)
    seen.expect(not now["kv_bytes"], f"{now['kv_bytes']:,} bytes of KV are held at rest")
    seen.finished = now["finished"]
    failed = now["finished"].get("error")
    seen.expect(not failed, f"{failed} requests failed inside the server")


class KeyedServer(KVBoostServer):
    """Ours, with a key for each of the tenants."""

    def environment(self, setting: Setting) -> dict[str, str]:
        return super().environment(setting) | {"KVBOOST_API_KEYS": ",".join(KEYS)}


def judge(seen: Seen) -> None:
    """Notes what must not be after a load of minutes."""
    first, *_, at_rest = seen.memory_mb
    seen.expect(
        at_rest <= (1 + MOST_GROWTH) * first, f"memory grew from {first:,.0f} to {at_rest:,.0f} MB"
    )
    before, after = seen.open_files
    seen.expect(after <= before + MORE_FILES, f"{after} files are open, {before} were before")
    light, crowd = (statistics.median(seen.seconds[who]) for who in ("light", "crowd"))
    seen.expect(light <= crowd, f"the light user waits {light:.1f} s, the crowd {crowd:.1f} s")


def run(settings: Settings, bench: Bench) -> Report:
    setting, _ = prepare(settings.model, MAX_RUNNING)
    setting = replace(setting, cache_bytes=CACHE_BYTES, dtype="float32")
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    options = ("--max-running", str(MAX_RUNNING), "--max-waiting", str(MAX_WAITING))
    server = KeyedServer("kvboost", "prefix_cache", *options)
    texts = [text[:TEXT_CHARACTERS] for _, text in docstrings() if len(text) >= TEXT_CHARACTERS]
    with running(server, setting, key=OPERATOR) as there:
        requests = make_requests(there.model, texts[:TEXTS])
        clients = 2 * (MAX_RUNNING + MAX_WAITING)
        load = overload(there, requests, clients=clients, seconds=60 * settings.minutes)
        seen = asyncio.run(load)
    judge(seen)
    return Report(vars(seen), [_told(seen)], problems=seen.problems)


def _told(seen: Seen) -> str:
    lines = [f"{number:7,}  {outcome}" for outcome, number in sorted(seen.outcomes.items())]
    lines.append(f"{seen.compared:,} answers compared, {seen.validated:,} of them by their schemas")
    lines.append(f"the server counts {seen.finished}")
    for who, seconds in seen.seconds.items():
        told = f"{statistics.median(seconds):.1f} s, {max(seconds):.1f} at most"
        lines.append(f"a short answer takes {told}: {who}, {len(seconds)} times")
    first, *_, at_rest = seen.memory_mb
    told = f"{first:,.0f} MB after a tenth of the time, {max(seen.memory_mb):,.0f} at most"
    lines.append(f"memory: {told}, {at_rest:,.0f} at rest")
    lines.append(f"open files: {seen.open_files[0]} before, {seen.open_files[1]} at rest")
    return "\n".join(lines)
