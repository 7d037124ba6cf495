"""Two servers behind ``kvboost route``: what content routing gains, and a server that is killed.

Each server's cache holds a part of the documents. Requests ask about one document each, in the
order of a Zipf distribution; new text of changing length comes before and after it, so no prompt
begins like another. Routed in turn, both servers read the same popular documents; routed by
content, each document has one server. The figure is the share of prompt tokens that the servers
report as not computed.

Then one server is killed while requests run. Every request must be answered as it is without
the kill, or fail with an error that tells the client to try again.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import httpx

from benchmarks.entries import BENCHMARKS
from kvboost.bench.kit.benchmark import Bench, Report, option
from kvboost.bench.kit.benchmark import Settings as Base
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.tables import percent, table
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import KVBoostServer, RouteServer
from kvboost.bench.peers.setting import Setting, Vocabulary, prepare
from kvboost.bench.serve.connection import KEPT_SECONDS
from kvboost.bench.texts.prompts import docstrings, sources
from kvboost.config import DEFAULT_MODEL, format_bytes
from kvboost.progress import Progress, Step

SERVERS = 2
CLIENTS = 2
"""Users that wait for an answer before their next request: one for each server."""
DOCUMENT_TOKENS = 256
FRESH_TOKENS = (8, 48)
"""New text before and after a document."""
PROMPT_TOKENS = DOCUMENT_TOKENS + sum(FRESH_TOKENS)
"""Of a prompt, on average."""
ANSWER_TOKENS = 4
STRATEGY = "query"
"""Of the repair. With ``auto`` a server computes known text where its clock says that this is as
fast, and two busy servers on one machine have poor clocks."""
ZIPF = 0.7
POLICIES = ("round-robin", "content")
GAIN = 1.6
ROUTING_GOAL, KILL_GOAL = BENCHMARKS["cluster"].goals
KILL_CLIENTS = 4
KILL_ANSWER_TOKENS = 24
KILL_PROMPTS = 4
RETRYABLE = (429, 502, 503)
TIMEOUT = 300.0


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    QUICK: ClassVar = {"documents": 12, "held": 4, "requests": 32, "kill_requests": 12}

    model: str = option(DEFAULT_MODEL, "A bundled name or a folder.")
    documents: int = option(24, "Documents that requests ask about.", least=2)
    held: int = option(6, "Documents that the cache of one server has room for.", least=1)
    requests: int = option(72, "Requests with each policy.", least=1)
    kill_requests: int = option(32, "Requests while a server is killed.", least=3 * KILL_CLIENTS)
    seed: int = option(0, "Another seed gives other requests.", least=0)


@dataclass
class Traffic:
    """Requests about documents, the same for the same seed."""

    documents: list[str]
    seed: int
    words: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, vocabulary: Vocabulary, documents: int, seed: int) -> Traffic:
        ids = vocabulary.encode("\n".join(source for _, source in sources()))
        starts = range(0, documents * DOCUMENT_TOKENS, DOCUMENT_TOKENS)
        texts = [vocabulary.decode(ids[start : start + DOCUMENT_TOKENS]) for start in starts]
        words = sorted({word for _, text in docstrings() for word in text.split()})
        return cls(texts, seed, words)

    def prompts(self) -> Iterator[str]:
        rng = random.Random(self.seed)
        weights = [1 / (number + 1) ** ZIPF for number in range(len(self.documents))]
        while True:
            (document,) = rng.choices(self.documents, weights)
            yield f"{self._fresh(rng)}\n\n{document}\n\n{self._fresh(rng)}"

    def _fresh(self, rng: random.Random) -> str:
        # A word of these has two tokens on average.
        return " ".join(rng.choices(self.words, k=rng.randint(*FRESH_TOKENS) // 2))


@dataclass
class Served:
    """The result of one policy, as the servers report it."""

    prompt_tokens: int = 0
    not_computed: int = 0
    by_server: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.not_computed / max(1, self.prompt_tokens)

    def note(self, answer: httpx.Response) -> None:
        if answer.status_code != 200:
            self.failures.append(f"HTTP {answer.status_code}: {answer.text[:200]}")
            return
        report = answer.json()["kvboost"]
        self.prompt_tokens += answer.json()["usage"]["prompt_tokens"]
        kept = report["exact_tokens"] + report["approximate_tokens"] + report["moved_tokens"]
        self.not_computed += kept - report["recomputed_tokens"]
        self.by_server[answer.headers["x-kvboost-upstream"]] += 1


@dataclass
class Killed:
    """The outcomes that clients saw while a server was killed."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    retryable: Counter[str] = field(default_factory=Counter)
    other: list[str] = field(default_factory=list)
    after: int = 0
    """Requests answered after the kill."""

    @property
    def problems(self) -> list[str]:
        wrong = [f"wrong answer: {one}" for one in self.wrong]
        other = [f"not to be retried: {one}" for one in self.other]
        none = [] if self.after else ["no request was answered after the kill"]
        return wrong + other + none


def body(model: str, prompt: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


async def load(
    route: Running, prompts: Iterator[str], requests: int, salt: str, on_answer: Callable[[], None]
) -> Served:
    """``CLIENTS`` users share ``prompts``; each waits for its answer."""
    served, numbers = Served(), iter(range(requests))

    async def talk(http: httpx.AsyncClient) -> None:
        for _ in numbers:
            options = {"cache_salt": salt, "kvboost": {"strategy": STRATEGY}}
            asked = body(route.model, next(prompts), ANSWER_TOKENS, **options)
            served.note(await http.post(f"{route.url}/v1/completions", json=asked))
            on_answer()

    async with open_client(TIMEOUT) as http:
        await asyncio.gather(*(talk(http) for _ in range(CLIENTS)))
    return served


def open_client(timeout: float, **options: Any) -> httpx.AsyncClient:
    """A client that keeps its connections, as OpenAI's does, and goes straight to the server. It
    closes an idle connection before a server would, so that no request meets one that ends."""
    return httpx.AsyncClient(
        timeout=timeout,
        limits=httpx.Limits(keepalive_expiry=KEPT_SECONDS),
        trust_env=False,
        verify=False,  # all servers speak HTTP; certificates would only be loaded
        **options,
    )


async def forget(servers: list[Running], salt: str) -> None:
    """Empties the caches, so that the next policy begins like the first."""
    async with open_client(TIMEOUT) as http:
        for server in servers:
            gone = await http.post(f"{server.url}/kvboost/forget", json={"cache_salt": salt})
            gone.raise_for_status()


async def references(server: Running, prompts: list[str]) -> dict[str, str]:
    """The right answers: each prompt alone, without reuse."""
    told = {}
    async with open_client(TIMEOUT) as http:
        for prompt in prompts:
            asked = body(server.model, prompt, KILL_ANSWER_TOKENS, kvboost={"mode": "baseline"})
            answer = await http.post(f"{server.url}/v1/completions", json=asked)
            told[prompt] = answer.raise_for_status().json()["choices"][0]["text"]
    return told


async def kill_one(
    route: Running,
    right: dict[str, str],
    requests: int,
    kill: Callable[[], None],
    on_answer: Callable[[], None],
) -> Killed:
    """Clients ask the prompts of ``right``, streamed and not, with exact reuse only, so that the
    answers must be equal. After a third of the requests, ``kill`` is called in mid-stream."""
    seen, numbers, prompts = Killed(), iter(range(requests)), list(right)
    killed = False

    async def ask(http: httpx.AsyncClient, number: int) -> str:
        nonlocal killed
        prompt = prompts[number % len(prompts)]
        exact = {"mode": "prefix_cache"}
        asked = body(route.model, prompt, KILL_ANSWER_TOKENS, kvboost=exact, stream=True)
        text = ""
        async with http.stream("POST", f"{route.url}/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return f"HTTP {answer.status_code}"
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    return "right" if text == right[prompt] else f"wrong {text!r}"
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return f"event {event['error'].get('code')}"
                text += event["choices"][0]["text"] if event["choices"] else ""
                if number >= requests // 3 and not killed:
                    killed = True
                    kill()
        return "the connection closed"

    async def talk(http: httpx.AsyncClient) -> None:
        for number in numbers:
            was_killed = killed
            try:
                outcome = await ask(http, number)
            except httpx.TransportError as error:
                outcome = type(error).__name__
            _note(seen, outcome, after=was_killed)
            on_answer()

    async with open_client(TIMEOUT) as http:
        await asyncio.gather(*(talk(http) for _ in range(KILL_CLIENTS)))
    return seen


def _note(seen: Killed, outcome: str, *, after: bool) -> None:
    """Counts an outcome. A connection that closes before an answer's end tells a client that the
    answer is not complete; its library says so and may retry."""
    retryable = {f"HTTP {status}" for status in RETRYABLE}
    retryable |= {"event upstream_lost", "RemoteProtocolError", "ReadError"}
    if outcome == "right":
        seen.right += 1
        seen.after += after
    elif outcome in retryable:
        seen.retryable[outcome] += 1
    elif outcome.startswith("wrong"):
        seen.wrong.append(outcome)
    else:
        seen.other.append(outcome)


@contextmanager
def cluster(setting: Setting) -> Iterator[list[Running]]:
    """The servers; they may end."""
    server = KVBoostServer("kvboost", "chunk_kv_reuse")
    with (
        running(server, setting, may_end=True) as one,
        running(server, setting, may_end=True) as other,
    ):
        yield [one, other]


def cache_bytes(setting: Setting, documents: int) -> int:
    """The bytes of the KV of prompts about so many documents."""
    config = json.loads((setting.folder / "config.json").read_text())
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    row: int = 2 * config["num_hidden_layers"] * heads * size * 4
    return documents * PROMPT_TOKENS * row


def run(settings: Settings, bench: Bench) -> Report:
    setting, vocabulary = prepare(settings.model)
    # Answers are compared, so rounding must not decide between tokens.
    setting = replace(setting, threads=max(1, setting.threads // SERVERS), dtype="float32")
    setting = replace(setting, cache_bytes=cache_bytes(setting, settings.held))
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    bench.say(
        f"{settings.documents} documents of {DOCUMENT_TOKENS} tokens; the cache of each of "
        f"{SERVERS} servers ({format_bytes(setting.cache_bytes)}) has room for {settings.held}"
    )
    traffic = Traffic.make(vocabulary, settings.documents, settings.seed)
    total = len(POLICIES) * settings.requests + settings.kill_requests
    with (
        cluster(setting) as servers,
        Progress(f"two servers, {total} requests") as progress,
        progress.step("requests", total) as step,
    ):
        served = {
            policy: _measure(policy, servers, setting, traffic, settings, step)
            for policy in POLICIES
        }
        killed = _kill(servers, setting, traffic, settings, step)
    return _report(settings, setting, served, killed)


def _options(settings: Settings, policy: str) -> tuple[str, ...]:
    remembered = settings.held * PROMPT_TOKENS
    return ("--policy", policy, "--remember", str(remembered), "--health-seconds", "0.5")


def _measure(
    policy: str,
    servers: list[Running],
    setting: Setting,
    traffic: Traffic,
    settings: Settings,
    step: Step,
) -> Served:
    router = RouteServer([server.url for server in servers], *_options(settings, policy))
    with running(router, setting) as route:
        served = asyncio.run(
            load(route, traffic.prompts(), settings.requests, policy, step.advance)
        )
    asyncio.run(forget(servers, policy))
    return served


def _kill(
    servers: list[Running], setting: Setting, traffic: Traffic, settings: Settings, step: Step
) -> Killed:
    prompts = [prompt for prompt, _ in zip(traffic.prompts(), range(KILL_PROMPTS), strict=False)]
    right = asyncio.run(references(servers[0], prompts))
    router = RouteServer([server.url for server in servers], *_options(settings, "content"))
    with running(router, setting) as route:
        return asyncio.run(
            kill_one(route, right, settings.kill_requests, servers[1].kill, step.advance)
        )


def _report(
    settings: Settings, setting: Setting, served: dict[str, Served], killed: Killed
) -> Report:
    turns, content = (served[policy].share for policy in POLICIES)
    gain = content / turns if turns else float("inf")
    rows = [
        (policy, percent(one.share), f"{one.prompt_tokens:,}", *_split(one))
        for policy, one in served.items()
    ]
    goals = [
        Goal(ROUTING_GOAL, gain >= GAIN, f"{gain:.2f} ×"),
        Goal(KILL_GOAL, not killed.problems, _outcome(killed)),
    ]
    figures = {
        "share_not_computed": {policy: one.share for policy, one in served.items()},
        "gain": gain,
        "cache_bytes": setting.cache_bytes,
        "killed": {
            "right": killed.right,
            "retryable": dict(killed.retryable),
            "after": killed.after,
        },
    }
    headings = ("tokens", "requests to one", "and the other")
    shown = table("prompt tokens not computed", ["policy"], ["share", *headings], rows)
    problems = [one for served_one in served.values() for one in served_one.failures]
    return Report(figures, [shown], goals, problems=problems + killed.problems)


def _split(served: Served) -> tuple[str, str]:
    counted = [str(number) for _, number in served.by_server.most_common()]
    one, other = (*counted, "0", "0")[:SERVERS]
    return one, other


def _outcome(killed: Killed) -> str:
    said = ", ".join(f"{number} {what}" for what, number in killed.retryable.items()) or "none"
    return (
        f"{killed.right} answered right, {killed.after} of them after the kill; "
        f"retryable errors: {said}; wrong: {len(killed.wrong)}"
    )
