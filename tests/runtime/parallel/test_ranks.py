"""Messages between ranks, and what rank 0 makes of failures: both ends in this process."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from threading import Thread

import pytest

from kvboost.errors import PromptError, RankLostError
from kvboost.runtime.parallel import ranks as ranks_module
from kvboost.runtime.parallel.follower import Follower
from kvboost.runtime.parallel.messages import Call
from kvboost.runtime.parallel.ranks import Link, Ranks


class Process(subprocess.Popen[bytes]):
    """What rank 0 sees of a process: here a thread."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._thread = Thread(target=work)
        self._thread.start()
        self.killed = False
        self.returncode = 7

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout or 0.0)
        return self.returncode

    def kill(self) -> None:
        self.killed = True

    def __del__(self) -> None: ...


Open = Callable[..., Ranks]


@pytest.fixture
def open_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Rank 0 of two; the other one does as it is told. On a busy machine the reason of a failure
    may come late; where there is none, waiting for it would be in vain."""
    opened: list[Ranks] = []

    def start(work: Callable[[Link], None], *, reason_seconds: float = 60.0) -> Ranks:
        monkeypatch.setattr(ranks_module, "REASON_SECONDS", reason_seconds)
        ours, theirs = (Link(end) for end in Pipe())

        def run() -> None:
            try:
                work(theirs)
            finally:
                theirs.close()

        opened.append(Ranks([Process(run)], [ours], lambda: None))
        return opened[-1]

    yield start
    for ranks in opened:
        ranks.close()


def follow(link: Link) -> None:
    Follower(link).serve()


def test_a_rank_answers_in_order_until_rank_0_ends(open_two: Open) -> None:
    ranks = open_two(follow)
    assert ranks.ask(Follower.has, 1) == [False]
    assert ranks.ask(Follower.give, 1) == [None]
    ranks.cast(Follower.copy, 2, 1, to_host=True)  # of a part that is lost
    assert ranks.ask(Follower.has, 2) == [False]
    with pytest.raises(RuntimeError, match="KeyError"):
        ranks.ask(Follower.pack, 1, 99, 0, 8, None, 0)
    assert ranks.ask(Follower.has, 1) == [False], "it goes on"
    ranks.close()
    with pytest.raises(RankLostError, match="closed"):
        ranks.ask(Follower.has, 1)


def test_a_rank_that_fails_says_why(open_two: Open) -> None:
    ranks = open_two(follow)
    ranks.cast(Follower.clear, 99, 0, 8)
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"rank 1 has failed: KeyError: 99.*another one"):
            ranks.ask(Follower.has, 1)
    with pytest.raises(RankLostError, match="rank 1 has failed"), ranks.together():
        raise AssertionError("not reached")


def test_the_reason_is_known_where_a_forward_breaks_off(open_two: Open) -> None:
    ranks = open_two(follow)
    with pytest.raises(RankLostError, match="rank 1 has failed: KeyError: 99"), ranks.together():
        ranks.cast(Follower.reserve, 99, 8)
        raise RuntimeError("Connection closed by peer")


def test_a_rank_that_ends_without_a_word(open_two: Open) -> None:
    ranks = open_two(lambda link: None)
    with pytest.raises(RankLostError, match="rank 1 has ended with exit status 7"):
        ranks.ask(Follower.has, 1)


def test_a_rank_that_is_stuck(open_two: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "STEP_SECONDS", 0.05)

    def wait_for_the_end(link: Link) -> None:
        with pytest.raises(EOFError):
            while True:
                link.receive()

    ranks = open_two(wait_for_the_end, reason_seconds=0.01)
    with pytest.raises(RankLostError, match=r"a rank is stuck: no answer within 0.05 s"):
        ranks.ask(Follower.has, 1)
    (process,) = ranks.processes
    assert isinstance(process, Process) and process.killed


def test_a_failure_of_rank_0_puts_the_ranks_out_of_step(open_two: Open) -> None:
    ranks = open_two(follow, reason_seconds=0.01)
    with pytest.raises(PromptError), ranks.together():
        raise PromptError("not this one")
    with pytest.raises(RankLostError, match=r"rank 0 has failed .* PromptError: not this one"):
        ranks.ask(Follower.has, 1)


def test_an_interrupt_stays_one(open_two: Open) -> None:
    ranks = open_two(follow, reason_seconds=0.01)
    with pytest.raises(KeyboardInterrupt), ranks.together():
        raise KeyboardInterrupt
    with pytest.raises(RankLostError):
        ranks.ask(Follower.has, 1)


def test_what_rank_0_lets_go_is_released_before_the_next_call(open_two: Open) -> None:
    seen: list[Call] = []

    def record(link: Link) -> None:
        while not seen or not seen[-1].is_answered:
            seen.append(link.receive())
        link.send(True)

    ranks = open_two(record)
    first, second, third = (ranks.new_handle() for _ in range(3))
    gone = [first.number, third.number]
    ranks.cast(Follower.reserve, second.number, 8)
    del first, third
    assert ranks.ask(Follower.has, second.number) == [True]
    assert seen == [
        Call(Follower.reserve, (second.number, 8), {}, is_answered=False, released=[]),
        Call(Follower.has, (second.number,), {}, is_answered=True, released=gone),
    ]
