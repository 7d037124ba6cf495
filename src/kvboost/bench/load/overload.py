"""``kvboost bench overload``: more requests than the server can answer, from hostile clients.

Some clients hang up, some send half a request, some send too much, some read a byte now and then.
The server must answer every request or refuse it with the right status, hold no KV when it is idle
again, and need no more memory than after the first minute.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.kit.benchmark import Settings as Base
from kvboost.bench.kit.memory import MOST_GROWTH, levels, resident_mb
from kvboost.bench.load.serve.clients import Target, closed_loop
from kvboost.bench.load.serve.users import Request, make_workload
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import KVBoostServer
from kvboost.bench.peers.setting import prepare
from kvboost.config import DEFAULT_MODEL
from kvboost.progress import Progress

USERS = 16
"""As many as the server runs at once."""
MAX_WAITING = 32
CACHE_BYTES = 512 * 1024**2
"""Soon full, so that memory does not grow because the cache fills."""
LONGEST_ANSWER = 24
MEASURED_REQUESTS = 4
"""Of each user, to find the load that the server can sustain."""
OVERLOAD = 2.0
OVERSIZE = 9 * 1024**2
JSON = {"content-type": "application/json"}
WRONG: list[dict[str, Any]] = [
    *({"tools": [{}]}, {"n": 0}, {"temperature": "hot"}, {"top_p": 7}, {"colour": "red"}),
]


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    QUICK: ClassVar = {"minutes": 1.0}

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    minutes: float = option(10.0, "How long the clients come.", least=0.1)


@dataclass
class Overload:
    """What was seen. ``problems`` is empty when all went well."""

    seconds: float = 0.0
    sustainable: float = 0.0
    """Requests per second of users that wait for their answers."""
    outcomes: dict[str, int] = field(default_factory=dict)
    resident_mb: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """All of the server's memory: after a tenth of the time, at the end, and at most."""
    settled_mb: float = 0.0
    """Memory without the KV of running requests, which comes and goes: after a tenth of the time,
    at the end, and at most."""
    end_mb: float = 0.0
    most_mb: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by the way they ended, as the server counts them."""
    problems: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return self.most_mb / self.settled_mb - 1 if self.settled_mb else 0.0


class Clients:
    """Clients of every kind. Each returns its outcome in a word; what must not happen is noted as a
    problem."""

    def __init__(
        self, server: Running, prompts: Iterator[Request], seed: int, seen: Overload
    ) -> None:
        self._url = server.url
        self._model = server.model
        self._prompts = prompts
        self._random = random.Random(seed)
        self._seen = seen
        self.outcomes: Counter[str] = Counter()
        self._client = httpx.AsyncClient(
            timeout=300, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False
        )
        self._kinds: dict[Callable[[], Awaitable[str]], int] = {
            self._ask: 50,
            self._stream: 15,
            self._hang_up: 15,
            self._hang_up_early: 5,
            self._malformed: 5,
            self._wrong_field: 3,
            self._oversize: 2,
            self._too_long: 1,
            self._slow_sender: 2,
            self._slow_reader: 2,
        }
        """How often each comes, in a hundred."""

    async def come(self) -> None:
        (kind,) = self._random.choices(list(self._kinds), list(self._kinds.values()))
        try:
            outcome = await kind()
        except Exception as error:
            outcome = f"{kind.__name__.strip('_')}: {type(error).__name__}"
            self._seen.problems.append(f"{outcome}: {error}")
        self.outcomes[outcome] += 1

    async def close(self) -> None:
        await self._client.aclose()

    async def kv_mb(self) -> float:
        """KV the server holds for running requests, and keeps for the next ones."""
        said = (await self._client.get(f"{self._url}/kvboost/cache?limit=1")).json()
        return float(said["serving"]["kv_bytes"] + said["stats"]["idle_kv_bytes"]) / 1e6

    def _body(self, **more: Any) -> dict[str, Any]:
        request = next(self._prompts)
        return {
            "model": self._model,
            "messages": list(request.messages),
            "max_tokens": self._random.randint(1, LONGEST_ANSWER),
            "temperature": self._random.choice([0, 0.7]),
            **more,
        }

    async def _post(self, **given: Any) -> httpx.Response:
        return await self._client.post(f"{self._url}/v1/chat/completions", **given)

    def _streaming(self, body: dict[str, Any]) -> AbstractAsyncContextManager[httpx.Response]:
        return self._client.stream("POST", f"{self._url}/v1/chat/completions", json=body)

    def _check(self, what: str, response: httpx.Response, *allowed: int) -> str:
        code = response.status_code
        if code == 429 and 429 in allowed:
            if not response.headers.get("retry-after", "").isdigit():
                self._seen.problems.append("429 without Retry-After")
            return "429"
        if code not in allowed:
            self._seen.problems.append(f"{what}: HTTP {code}: {response.text[:200]}")
        return f"{what}: {code}"

    async def _ask(self) -> str:
        response = await self._post(json=self._body())
        outcome = self._check("answered", response, 200, 429)
        if response.status_code == 200:
            (choice,) = response.json()["choices"]
            if choice["finish_reason"] not in ("stop", "length"):
                self._seen.problems.append(f"finish_reason {choice['finish_reason']!r}")
        return outcome

    async def _stream(self) -> str:
        body = self._body(stream=True, stream_options={"include_usage": True})
        async with self._streaming(body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._check("streamed", response, 429)
            lines = [line async for line in response.aiter_lines() if line]
        if lines[-1] != "data: [DONE]":
            self._seen.problems.append(f"a stream ended with {lines[-1][:100]!r}")
        return "streamed: 200"

    async def _hang_up(self) -> str:
        """Leaves after a few pieces."""
        left = self._random.randrange(1, 6)
        async with self._streaming(self._body(stream=True)) as response:
            if response.status_code != 200:
                await response.aread()
                return self._check("left", response, 429)
            async for _ in response.aiter_lines():
                left -= 1
                if left < 0:
                    break
        return "left"

    async def _hang_up_early(self) -> str:
        """Leaves before there is an answer."""
        with suppress(httpx.TimeoutException):
            await self._client.post(
                f"{self._url}/v1/chat/completions",
                json=self._body(),
                timeout=httpx.Timeout(5, read=self._random.uniform(0.01, 0.5)),
            )
        return "left early"

    async def _malformed(self) -> str:
        whole = json.dumps(self._body())
        content = whole[: self._random.randrange(1, len(whole))].encode()
        return self._check("malformed", await self._post(content=content, headers=JSON), 400)

    async def _wrong_field(self) -> str:
        body = self._body(**self._random.choice(WRONG))
        return self._check("wrong field", await self._post(json=body), 400)

    async def _oversize(self) -> str:
        content = b'{"messages": "' + b"x" * OVERSIZE + b'"}'
        try:
            response = await self._post(content=content, headers=JSON)
        except (httpx.WriteError, httpx.ReadError):  # refused before all of it was sent
            return "oversize: refused"
        return self._check("oversize", response, 413)

    async def _too_long(self) -> str:
        body = self._body(messages=[{"role": "user", "content": "word " * 40_000}])
        return self._check("too long", await self._post(json=body), 400)

    async def _slow_sender(self) -> str:
        """Sends half a request, a byte at a time, and then leaves."""
        _, writer = await self._connect()
        with suppress(ConnectionError):
            for byte in self._head(1000) + b"{":
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.01)
        await _hang_up(writer)
        return "half a request"

    async def _slow_reader(self) -> str:
        """Asks for a stream and reads it a byte at a time, for a while."""
        reader, writer = await self._connect()
        body = json.dumps(self._body(stream=True)).encode()
        writer.write(self._head(len(body)) + body)
        await writer.drain()
        for _ in range(50):
            if not await reader.read(1):
                break
            await asyncio.sleep(0.1)
        await _hang_up(writer)
        return "read slowly"

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        place = urlsplit(self._url)
        return await asyncio.open_connection(place.hostname, place.port)

    def _head(self, length: int) -> bytes:
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        return head.encode()


async def _hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def overload(
    server: Running,
    requests: Iterator[Request],
    rate: float,
    seconds: float,
    seen: Overload,
    on_second: Callable[[], None] = lambda: None,
    least_clients: int = 0,
) -> None:
    """Sends clients at ``rate`` per second for ``seconds``, longer if fewer than ``least_clients``
    have come, and waits until the last has left."""
    clients = Clients(server, requests, 0, seen)
    rng = random.Random(1)
    memory: list[float] = []
    resident: list[float] = []
    tasks: set[asyncio.Task[None]] = set()
    start = time.monotonic()

    async def watch() -> None:
        while True:
            if time.monotonic() - start > seconds / 10:
                held = await clients.kv_mb()
                resident.append(resident_mb(server.pid))
                memory.append(resident[-1] - held)
            on_second()
            await asyncio.sleep(1)

    watching = asyncio.create_task(watch())
    try:
        sent = 0
        while time.monotonic() - start < seconds or sent < least_clients:
            sent += 1
            task = asyncio.create_task(clients.come())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(rng.expovariate(rate))
        await asyncio.gather(*tasks)
    finally:
        watching.cancel()
        await clients.close()
    seen.seconds = time.monotonic() - start
    seen.outcomes = dict(sorted(clients.outcomes.items()))
    seen.settled_mb, seen.end_mb, seen.most_mb = levels(memory)
    seen.resident_mb = levels(resident)


async def check_rest(server: Running, seen: Overload) -> None:
    """Notes what an idle server still holds."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
        deadline = time.monotonic() + 30
        while True:
            said = (await client.get("/kvboost/cache")).json()["serving"]
            if not said["running"] and not said["waiting"]:
                break
            if time.monotonic() > deadline:
                seen.problems.append(
                    f"{said['running']} requests still run and {said['waiting']} wait at rest"
                )
                break
            await asyncio.sleep(0.2)
        if said["kv_bytes"]:
            seen.problems.append(f"{said['kv_bytes']:,} bytes of KV are held at rest")
        seen.finished = said["finished"]
        if errors := said["finished"].get("error"):
            seen.problems.append(f"{errors} requests failed inside")
        body = {"model": server.model, "messages": [{"role": "user", "content": "Still there?"}]}
        response = await client.post("/v1/chat/completions", json={**body, "max_tokens": 4})
        if response.status_code != 200:
            seen.problems.append(f"afterwards: HTTP {response.status_code}")


def run(settings: Settings, bench: Bench) -> Report:
    setting, vocabulary = prepare(settings.model, USERS)
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    server = KVBoostServer("kvboost", "chunk_kv_reuse", "--max-waiting", str(MAX_WAITING))
    sizes = {"users": USERS * 2, "requests": MEASURED_REQUESTS}
    work = make_workload("mixed", vocabulary.count, **sizes, seed=0)
    seen = Overload()
    with (
        running(server, replace(setting, cache_bytes=CACHE_BYTES)) as there,
        Progress(f"more than it can answer, for {settings.minutes:g} minutes") as progress,
    ):
        with progress.step("finding what it can answer"):
            target = Target(there.url, there.model, max_tokens=LONGEST_ANSWER // 2, seconds=60)
            for users in (work.warmup, work.users[:USERS]):
                start = time.perf_counter()
                answers = asyncio.run(closed_loop(target, users))
                elapsed = time.perf_counter() - start
            seen.sustainable = len(answers) / elapsed
        seconds = settings.minutes * 60
        with progress.step("seconds", math.ceil(seconds)) as step:
            prompts = cycle(request for user in work.users for request in user)
            rate = OVERLOAD * seen.sustainable
            asyncio.run(overload(there, prompts, rate, seconds, seen, step.advance))
        asyncio.run(check_rest(there, seen))
    if seen.growth > MOST_GROWTH:
        seen.problems.append(
            f"memory grew from {seen.settled_mb:.0f} to {seen.most_mb:.0f} MB "
            f"({seen.growth:.1%}; the limit is {MOST_GROWTH:.0%})"
        )
    return Report(asdict(seen) | {"growth": seen.growth}, [told(seen)], problems=seen.problems)


def told(seen: Overload) -> str:
    first, last, most = seen.resident_mb
    lines = [
        f"{sum(seen.outcomes.values()):,} clients in {seen.seconds / 60:.1f} minutes, "
        f"{OVERLOAD:g} × the {seen.sustainable:.1f} requests/s that {USERS} users reached",
        *(f"  {number:6,}  {outcome}" for outcome, number in seen.outcomes.items()),
        f"the server counts {seen.finished}",
        f"memory without the KV of running requests: {seen.settled_mb:,.0f} MB after a tenth of "
        f"the time, at most {seen.most_mb:,.0f} later ({seen.growth:+.1%}), {seen.end_mb:,.0f} at "
        f"the end; with it {first:,.0f}, {most:,.0f} and {last:,.0f}",
    ]
    if not seen.problems:
        lines.append("every request was answered or refused as it should be; nothing leaked")
    return "\n".join(lines)
