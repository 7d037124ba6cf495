"""The other ranks and their processes, as rank 0 sees them."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import distributed
from torch.distributed import FileStore  # type: ignore[attr-defined]

from kvboost.errors import ConfigError, KVBoostError, RankLostError
from kvboost.runtime.devices import device_of
from kvboost.runtime.parallel.messages import Call, Failure

if TYPE_CHECKING:
    from kvboost.runtime.parallel.follower import Follower

Args = ParamSpec("Args")
Answer = TypeVar("Answer")

STEP_SECONDS = 300.0
"""How long a rank waits for the others in a forward, and rank 0 for an answer."""
END_SECONDS = 10.0
"""How long a process may take to end before it is killed."""
REASON_SECONDS = 0.5
"""How long to wait for the reason of a failure that has already happened."""


class Handle:
    """A number that all ranks know a buffer or a chunk by. When the last owner of the handle is
    gone, the other ranks release theirs."""

    def __init__(self, number: int, released: deque[int]) -> None:
        self.number = number
        # The garbage collector may run this in a thread that holds any lock, so it takes none.
        weakref.finalize(self, released.append, number).atexit = False


class Link:
    """Objects over a connection, in plain pickle: torch's own way would share memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, item: object) -> None:
        self._connection.send_bytes(pickle.dumps(item))

    def receive(self, seconds: float | None = None) -> Any:
        """The next object. Raises ``EOFError`` if the other side has ended, ``TimeoutError`` after
        ``seconds``."""
        try:
            if not self._connection.poll(seconds):
                raise TimeoutError(f"no answer within {seconds:g} s")
            return pickle.loads(self._connection.recv_bytes())
        except TimeoutError:
            raise
        except OSError as error:
            raise EOFError(str(error)) from error

    def close(self) -> None:
        self._connection.close()


class Ranks:
    """The other ranks of this process, which is rank 0. Thread-safe.

    Calls arrive in the order in which they are made. If a rank is lost, or fails in the middle
    of a forward, the ranks are out of step for good: every call from then on raises
    ``RankLostError``.
    """

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        links: Sequence[Link],
        on_close: Callable[[], None],
    ) -> None:
        self.size = len(links) + 1
        self.processes = processes
        self._links = links
        self._on_close = on_close
        self._numbers = iter(range(sys.maxsize))
        self._released: deque[int] = deque()
        self._lock = threading.RLock()
        self._stepping = threading.Lock()
        self.failure: RankLostError | None = None
        """Why the ranks are out of step."""

    def new_handle(self) -> Handle:
        with self._lock:
            return Handle(next(self._numbers), self._released)

    def cast(
        self,
        do: Callable[Concatenate[Follower, Args], None],
        *args: Args.args,
        **options: Args.kwargs,
    ) -> None:
        """Has all other ranks call a method, and does not wait for it."""
        with self._lock, self._explained():
            self._send(do, [args] * len(self._links), options, is_answered=False)

    def ask(
        self,
        do: Callable[Concatenate[Follower, Args], Answer],
        *args: Args.args,
        **options: Args.kwargs,
    ) -> list[Answer]:
        """What a method returns on the other ranks, in their order."""
        assert not options
        return self.ask_each(do, [args] * len(self._links))

    def ask_each(
        self, do: Callable[..., Answer], several: Sequence[tuple[Any, ...]]
    ) -> list[Answer]:
        """The same with arguments for each rank. Raises ``RuntimeError`` if one cannot do it, such
        as for lack of memory."""
        with self._lock, self._explained():
            self._send(do, several, {}, is_answered=True)
            answers = [link.receive(STEP_SECONDS) for link in self._links]
            for rank, answer in enumerate(answers, 1):
                if isinstance(answer, Failure) and answer.fatal:
                    raise _RankFailed(rank, answer)
        for answer in answers:
            if isinstance(answer, Failure):
                raise RuntimeError(answer.reason)
        return answers

    @contextmanager
    def together(self) -> Iterator[None]:
        """Something that all ranks do at the same time: tell them first, then do it here. One
        thread at a time."""
        with self._stepping, self._explained():
            yield

    def close(self) -> None:
        """Ends the other ranks."""
        for link in self._links:
            link.close()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            process.wait()
        if self.failure is None:
            self.failure = RankLostError("the other ranks of this engine have been closed")
        self._on_close()

    def _send(
        self,
        do: Callable[..., Any],
        several: Sequence[tuple[Any, ...]],
        options: Mapping[str, Any],
        *,
        is_answered: bool,
    ) -> None:
        released = []
        while self._released:
            released.append(self._released.popleft())
        for link, args in zip(self._links, several, strict=True):
            link.send(Call(do, args, options, is_answered, released))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns any failure into ``RankLostError`` and ends the other ranks: they may be waiting in
        a forward that will never go on."""
        if self.failure is not None:
            raise self.failure
        try:
            yield
        except RankLostError:
            raise
        except BaseException as error:
            self.failure = RankLostError(
                f"{self._reason(error)}; the model is split over {self.size} ranks, which must all "
                "run, so this engine serves no more requests: close it and make another one"
            )
            for process in self.processes:
                process.kill()
            if isinstance(error, KVBoostError) or not isinstance(error, Exception):
                raise  # it says what is wrong, or is an interrupt
            raise self.failure from error

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, _RankFailed):
            return str(error)
        for rank, (process, link) in enumerate(zip(self.processes, self._links, strict=True), 1):
            with suppress(EOFError, TimeoutError):
                while True:
                    answer = link.receive(REASON_SECONDS)
                    if isinstance(answer, Failure) and answer.fatal:
                        return str(_RankFailed(rank, answer))
            with suppress(subprocess.TimeoutExpired):
                return f"rank {rank} has ended with exit status {process.wait(REASON_SECONDS)}"
        if isinstance(error, TimeoutError):
            return f"a rank is stuck: {error}"
        return f"rank 0 has failed while the others waited: {type(error).__name__}: {error}"


class _RankFailed(Exception):
    def __init__(self, rank: int, failure: Failure) -> None:
        super().__init__(f"rank {rank} has failed: {failure.reason}")


START_SECONDS = 300.0
"""How long a process may take to import what it needs."""
PROGRAM = """
import json, sys
sys.path[:], *arguments = json.loads(sys.argv[1])
from kvboost.runtime.parallel.follower import main
main(*arguments)
"""
"""The program of another rank. It imports from the same folders as this process."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


def open_ranks(size: int, device: torch.device) -> Ranks:
    """Starts ``size - 1`` processes for devices of this kind; returns when they are ready."""
    if distributed.is_initialized():
        raise ConfigError(
            f"tp_size={size}: this process has a process group of torch.distributed already; close "
            "the other engine with tp_size first, and do not use torchrun: KVBoost starts its "
            "processes itself"
        )
    backend = device_of(device).collectives
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvboost-ranks-"))
        stack.callback(_leave_group)
        meeting = os.path.join(folder, "meeting")
        processes: list[subprocess.Popen[bytes]] = []
        links: list[Link] = []
        for rank in range(1, size):
            process, link = _start(rank, size, meeting, backend)
            processes.append(process)
            links.append(link)
        ranks = Ranks(processes, links, stack.pop_all().close)
    try:
        with ranks.together():
            for link in links:  # each says that it is there
                link.receive(START_SECONDS)
            join_group(meeting, backend, 0, size)
    except BaseException:
        ranks.close()
        raise
    return ranks


def _start(
    rank: int, size: int, meeting: str, backend: str
) -> tuple[subprocess.Popen[bytes], Link]:
    ours, theirs = socket.socketpair()
    threads = max(1, torch.get_num_threads() // size)
    with theirs:
        arguments = [sys.path, rank, size, meeting, backend, theirs.fileno(), threads]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, json.dumps(arguments)],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for rank 0, which then ends the others
        )
    return process, Link(Connection(ours.detach()))


def join_group(meeting: str, backend: str, rank: int, size: int) -> None:
    """Makes this process a rank of torch's default process group, over this machine's loopback.
    The ranks meet in the file ``meeting``."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    distributed.init_process_group(
        backend,
        store=FileStore(meeting, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=STEP_SECONDS),
    )


def _leave_group() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()
