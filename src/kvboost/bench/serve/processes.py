"""Client processes: each sends the requests of its share of the users.

One process of Python would be the limit of what a fast server can show. The processes are started
once and take one load after the other. All begin a load at the same moment.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, cast

from kvboost.bench.serve.clients import Answer, OnAnswer, Target, closed_loop
from kvboost.bench.serve.users import Request
from kvboost.errors import KVBoostError

PROCESSES = 4
READY, ANSWERED = "ready", "answered"


class Clients:
    """Processes that send requests. They live as long as the ``with`` block."""

    def __init__(self, count: int = PROCESSES) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = spawning.Pipe()
            process = spawning.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def load(
        self, target: Target, users: Sequence[Sequence[Request]], on_answer: OnAnswer = lambda: None
    ) -> list[Answer]:
        """The answers to all requests of ``users``, who begin together."""
        count = len(self._pipes)
        busy = self._pipes[: len(users)]
        for number, pipe in enumerate(busy):
            pipe.send((target, users[number::count]))
        for pipe in busy:
            _receive(pipe)
        since = time.perf_counter()
        for pipe in busy:
            pipe.send(since)
        answers: list[Answer] = []
        while busy:
            for pipe in cast("list[Pipe]", wait(busy)):
                said = _receive(pipe)
                if said == ANSWERED:
                    on_answer()
                else:
                    answers += said
                    busy.remove(pipe)
        return answers

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
            process.join()


def _receive(pipe: Pipe) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise KVBoostError("a process of the benchmark's clients has ended") from error


def _serve(pipe: Pipe) -> None:
    """The work of one process, until the other end of ``pipe`` is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark ends us
    while True:
        try:
            target, users = pipe.recv()
        except EOFError:
            return
        pipe.send(READY)
        since = pipe.recv()
        pipe.send(asyncio.run(closed_loop(target, users, lambda: pipe.send(ANSWERED), since=since)))
