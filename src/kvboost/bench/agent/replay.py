"""Recorded sessions of agents, replayed against servers.

Each session's prompts are sent in order, as they were recorded, so every server reads the same
prompts whatever it answers. After each one comes the same prompt with the recorded answer behind
it, which is not counted: from then on the server knows the answer, as if it had written it. Prompts
are raw completions, since a trace has the text that a model read, with its template or without.
Every session has a salt of its own: nothing comes from another session, as with the ideal prefix
cache that servers are compared with. All servers run, and each is frozen while another takes its
turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from kvboost.bench.agent.checks import ANSWER_TOKENS, LOGPROBS, Check
from kvboost.bench.agent.replay_report import Replayed, path_problems, replay_figure, show
from kvboost.bench.agent.settings import Settings
from kvboost.bench.agent.traced import Prompt, Traced, choose_checked, trace_session
from kvboost.bench.kit.benchmark import Bench, Report
from kvboost.bench.peers.process import Running, running
from kvboost.bench.peers.servers import BASELINE, CONNECTOR, OURS, SYSTEMS
from kvboost.bench.peers.setting import Setting, Vocabulary, prepare
from kvboost.bench.serve.clients import NO_TEXT, Answer, send
from kvboost.bench.serve.connection import Connection
from kvboost.bench.serve.run import describe_systems, find_systems, given_up, rotated
from kvboost.bench.texts.prompts import passages
from kvboost.bench.texts.trace import choose_sessions, read_trace
from kvboost.errors import ConfigError, KVBoostError
from kvboost.progress import Progress, Step

MAX_TOKENS = 1
"""Of an answer that nobody reads: what the next prompts hold is the recorded one."""
TIMEOUT_SECONDS = 600.0
WARM_CHARACTERS = 2000
CONNECTOR_ROWS = 'vllm:kvboost_prompt_tokens_total{{engine="0",model_name="{}",source="{}"}}'


def run(settings: Settings, bench: Bench) -> Report:
    assert settings.trace is not None
    recorded = choose_sessions(read_trace(settings.trace), settings.kinds)
    planned = min(settings.sessions or len(recorded), len(recorded))
    setting, vocabulary = prepare(
        settings.model,
        settings.at_once,
        threads=settings.threads,
        device=torch.device(settings.device),
        vllm=settings.vllm,
    )
    bench.describe(setting.device, setting.dtype, threads=setting.threads)
    most = _most_tokens(settings, setting)
    named = settings.systems or tuple(name for name in SYSTEMS if name != BASELINE)
    present, missing = find_systems(named, setting, bench)
    if settings.checked and OURS not in present:
        raise ConfigError(f"checked={settings.checked} compares answers of {OURS}; measure it too")
    with Progress(f"{planned} recorded sessions") as progress:
        sessions: list[Traced] = []
        unsent: list[Traced] = []
        with progress.step("counting tokens", planned) as step:
            for one in recorded:
                if len(sessions) == planned:
                    break
                traced = trace_session(one, vocabulary.encode, most)
                (sessions if traced.prompts else unsent).append(traced)
                step.advance(bool(traced.prompts))
        if not sessions:
            raise ConfigError(f"{settings.trace}: no request has between 1 and {most} tokens")
        checked = choose_checked(sessions, settings.checked, settings.seed)
        replay = Replay(settings, setting, vocabulary, sessions, checked)
        replay.run(present, progress)
    found = Replayed(
        replay.done,
        replay.answers,
        replay.checks,
        replay.inside_vllm,
        replay.computed_inside if settings.at_once == 1 else None,
        settings.checked,
    )
    return Report(
        {
            "systems": describe_systems(present, setting, replay.started_s),
            "missing": missing,
            "failures": replay.failures,
            "most_tokens": most,
            "sessions_too_late": len(sessions) - len(replay.done),
            "sessions_without_requests": [asdict(one) for one in unsent],
            **found.as_json(),
        },
        list(show(found, replay.failures, sessions, unsent, most)),
        draw=partial(replay_figure, found) if found.answers else None,
        problems=path_problems(found),
    )


def _most_tokens(settings: Settings, setting: Setting) -> int:
    """Of a prompt: the model's context less an answer, or as many as the user says."""
    room = setting.context_length - (ANSWER_TOKENS if settings.checked else MAX_TOKENS)
    if (settings.most_tokens or 0) > room:
        raise ConfigError(
            f"most_tokens={settings.most_tokens} must be at most {room}: the model's context of "
            f"{setting.context_length} tokens, less the answer"
        )
    return settings.most_tokens or room


class Replay:
    """Sends sessions to servers, and keeps what they answered."""

    def __init__(
        self,
        settings: Settings,
        setting: Setting,
        vocabulary: Vocabulary,
        sessions: Sequence[Traced],
        checked: set[int],
    ) -> None:
        """``checked``: the lines of requests that are also asked without reuse."""
        self.failures: dict[str, str] = {}
        """Why a system was given up, by its name."""
        self.started_s: dict[str, float] = {}
        self.done: list[Traced] = []
        """The sessions that there was time for."""
        self.checks: list[Check] = []
        self.inside_vllm: dict[str, float] = {}
        """The rows that KVBoost has put into vLLM's pages, by source."""
        self.computed_inside = 0
        """Those that it has computed there for prompts, if sessions run one by one."""
        self._answers: dict[str, dict[int, Answer]] = {}
        self._settings = settings
        self._setting = setting
        self._bias = {str(number): -100 for number in vocabulary.special_ids}
        self._sessions = sessions
        self._checked = checked
        self._servers: dict[str, Running] = {}

    @property
    def answers(self) -> dict[str, dict[int, Answer]]:
        """Of each system that was not given up: its answers by the line of the request."""
        return {name: own for name, own in self._answers.items() if name not in self.failures}

    def run(self, present: Sequence[str], progress: Progress) -> None:
        """Every session. A system that fails is given up; the others go on."""
        with ExitStack() as stack:
            for name in present:
                with progress.step(f"starting {name}"), given_up(self.failures, name):
                    there = stack.enter_context(running(SYSTEMS[name], self._setting, may_end=True))
                    stack.callback(there.thaw)
                    self._warm_up(name, there)
                    there.freeze()
                    self.started_s[name] = there.started_s
                    self._servers[name] = there
                    self._answers[name] = {}
            until = time.monotonic() + 60 * self._settings.minutes
            size = self._settings.at_once
            for first in range(0, len(self._sessions), size):
                if not self._servers or (first and time.monotonic() > until):
                    break
                group = self._sessions[first : first + size]
                self._play(group, rotated(list(self._servers), first // size), progress)
                self.done += group
            if OURS in self._servers:
                self._check(self._servers[OURS], progress)
            if CONNECTOR in self._servers:
                self._look_inside(self._servers[CONNECTOR])

    def _play(self, group: Sequence[Traced], names: Sequence[str], progress: Progress) -> None:
        """Some sessions at the same time on each server, one server after the other."""
        last = len(self.done) + len(group)
        told = f"{last} of {len(self._sessions)}, {', '.join(one.kind for one in group)}"
        for name in names:
            total = sum(len(one.prompts) for one in group)
            server = self._servers[name]
            with (
                progress.step(f"session {told}: {name}", total) as step,
                given_up(self.failures, name),
                server.thawed(),
            ):
                asyncio.run(self._sessions_of(name, server, group, step))
        for name in self.failures:
            self._servers.pop(name, None)

    async def _sessions_of(
        self, name: str, server: Running, group: Sequence[Traced], step: Step
    ) -> None:
        """Raises ``KVBoostError`` if a request is not answered."""

        async def play(session: Traced) -> None:
            with closing(Connection(server.url)) as connection:
                for prompt in session.prompts:
                    body = self._body(name, server, prompt, f"{session.kind} {session.name}")
                    before = self._computed_inside(name, server)
                    answer = await _complete(connection, body, prompt.line)
                    self.computed_inside += self._computed_inside(name, server) - before
                    self._answers[name][prompt.line] = answer
                    await _read_answer(connection, body, prompt)
                    step.advance()

        await asyncio.gather(*map(play, group))

    def _body(self, name: str, server: Running, prompt: Prompt, salt: str) -> dict[str, Any]:
        how = {"kvboost": {"reuse_moved": self._settings.reuse_moved}}
        return {
            "model": server.model,
            "prompt": prompt.text,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logit_bias": self._bias,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
            **(how if name == OURS else {}),
        }

    def _warm_up(self, name: str, server: Running) -> None:
        """The first request of a process is slow; this one is not counted."""
        most = min(WARM_CHARACTERS, self._setting.context_length // 4)
        text = "\n\n".join(text for _, text in passages())[:most]
        body = self._body(name, server, Prompt(0, text, 0, 0, 0), "warm-up")

        async def ask() -> None:
            with closing(Connection(server.url)) as connection:
                await _complete(connection, body, 0)

        asyncio.run(ask())

    def _check(self, server: Running, progress: Progress) -> None:
        """Replays sessions again up to their last checked turn, for itself: the longer answers of
        checked turns are kept, and would count as known text."""
        sessions = [
            (session, at + 1)
            for session in self.done
            for at in [self._last_checked(session)]
            if at is not None
        ]
        if not sessions:
            return
        longer = {"max_tokens": ANSWER_TOKENS, "logprobs": LOGPROBS}
        full = {**longer, "kvboost": {"mode": "baseline"}}

        async def replay(session: Traced, count: int, step: Step) -> None:
            with closing(Connection(server.url)) as connection:
                for prompt in session.prompts[:count]:
                    is_checked = prompt.line in self._checked
                    body = self._body(
                        OURS, server, prompt, f"{session.kind} {session.name} checked"
                    )
                    body |= longer if is_checked else {}
                    reused = await _complete(connection, body, prompt.line)
                    if is_checked:
                        expected = await _complete(connection, body | full, prompt.line)
                        check = Check.of(session.kind, prompt.line, expected, reused)
                        self.checks.append(check)
                    await _read_answer(connection, body, prompt)
                    step.advance()

        with (
            progress.step("checked turns", sum(count for _, count in sessions)) as step,
            given_up(self.failures, OURS),
            server.thawed(),
        ):
            for session, count in sessions:
                asyncio.run(replay(session, count, step))

    def _last_checked(self, session: Traced) -> int | None:
        found = [at for at, one in enumerate(session.prompts) if one.line in self._checked]
        return found[-1] if found else None

    def _computed_inside(self, name: str, server: Running) -> int:
        """The number of rows that KVBoost has computed in vLLM's pages so far; 0 if sessions run at
        the same time, since the counters do not tell whose rows they are."""
        if name != CONNECTOR or self._settings.at_once > 1:
            return 0
        counters = (CONNECTOR_ROWS.format(server.model, one) for one in ("recomputed", "computed"))
        return sum(int(server.metric(one) or 0) for one in counters)

    def _look_inside(self, server: Running) -> None:
        with server.thawed():
            for source in ("exact", "moved", "recomputed", "computed"):
                rows = server.metric(CONNECTOR_ROWS.format(server.model, source))
                self.inside_vllm[source] = rows or 0.0


async def _complete(connection: Connection, body: dict[str, Any], line: int) -> Answer:
    answer = Answer(0.0)
    await send(connection, "/v1/completions", body, TIMEOUT_SECONDS, answer)
    if answer.error == NO_TEXT:  # a part of a character; it has come all the same
        answer.ttft_s, answer.error = answer.total_s, None
    if answer.error is not None:
        raise KVBoostError(f"the request of line {line} failed: {answer.error}")
    return answer


async def _read_answer(connection: Connection, body: dict[str, Any], prompt: Prompt) -> None:
    """Lets the server read the recorded answer to ``prompt``, which ``body`` has asked."""
    if prompt.answer:
        told = body | {"prompt": prompt.text + prompt.answer, "max_tokens": MAX_TOKENS}
        await _complete(connection, told, prompt.line)
