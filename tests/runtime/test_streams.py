"""How answers reach their readers: in order, complete, and with few wake-ups."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvboost.config import SamplingParams
from kvboost.runtime.keeping import Keeping
from kvboost.runtime.request import RequestState
from kvboost.runtime.streams import AsyncTextStream, FutureAnswer, Outbox
from support.requests import request_of
from support.tiny import make_engine, tiny_model


class Notes:
    """A reader, or a listener, that writes down what it receives."""

    def __init__(self, event_loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.event_loop = event_loop
        self.notes: list[Any] = []

    def push(self, pieces: list[str]) -> None:
        self.notes += pieces

    def end(self, error: BaseException | None) -> None:
        self.notes.append(error)


@pytest.fixture
def state() -> RequestState:
    return RequestState(request_of([1, 2, 3], params=SamplingParams(max_new_tokens=8)))


def count_wakes(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """What this event loop is woken for from now on."""
    event_loop, woken = asyncio.get_running_loop(), []
    call = event_loop.call_soon_threadsafe

    def counting(callback: Callable[..., None], *given: Any, **more: Any) -> Any:
        woken.append(callback)
        return call(callback, *given, **more)

    monkeypatch.setattr(event_loop, "call_soon_threadsafe", counting)
    return woken


def test_an_outbox_wakes_an_event_loop_once_for_all_that_is_in_it(monkeypatch) -> None:
    async def main() -> None:
        woken = count_wakes(monkeypatch)
        readers = [Notes(asyncio.get_running_loop()) for _ in range(5)]
        outbox = Outbox()
        for number, reader in enumerate(readers):
            outbox.push(reader, [f"{number}a", f"{number}b"])
            outbox.push(reader, [f"{number}c"])
            outbox.end(reader, None)
        assert woken == [] and all(reader.notes == [] for reader in readers)
        outbox.send()
        outbox.send()  # nothing is left
        assert len(woken) == 1
        await asyncio.sleep(0)
        for number, reader in enumerate(readers):
            assert reader.notes == [f"{number}a", f"{number}b", f"{number}c", None]

    asyncio.run(main())


def test_a_listener_of_no_event_loop_is_told_at_once(state: RequestState) -> None:
    outbox, answer = Outbox(), FutureAnswer(state)
    outbox.push(answer, ["a"])
    outbox.end(answer, ValueError("wrong"))
    assert isinstance(answer.done.exception(0), ValueError)


def test_a_closed_event_loop_does_not_keep_others_from_their_pieces() -> None:
    gone = asyncio.new_event_loop()
    gone.close()

    async def main() -> None:
        outbox, reader = Outbox(), Notes(asyncio.get_running_loop())
        outbox.push(Notes(gone), ["lost"])
        outbox.push(reader, ["a"])
        outbox.send()
        await asyncio.sleep(0)
        assert reader.notes == ["a"]

    asyncio.run(main())


@pytest.mark.parametrize("error", [None, ValueError("wrong")])
@pytest.mark.parametrize("arrived", [0, 1, 3, 4])
def test_a_reader_gets_everything_whenever_it_starts(
    arrived: int, error: ValueError | None, state: RequestState
) -> None:
    async def main() -> None:
        stream, reader = AsyncTextStream(state), Notes()
        calls = [lambda: stream.push(["a", "b"]), lambda: stream.push(["c"])]
        calls += [lambda: stream.push(["d"]), lambda: stream.end(error)]
        for call in calls[:arrived]:
            call()
        stream.read_by(reader)
        for call in calls[arrived:]:
            call()
        assert reader.notes == ["a", "b", "c", "d", error]
        await stream.aclose()
        assert [piece async for piece in stream] == []

    asyncio.run(main())


def test_an_iterator_raises_the_error_after_the_last_piece(state: RequestState) -> None:
    async def main() -> None:
        stream, seen = AsyncTextStream(state), []
        stream.push(["a"])
        stream.end(ValueError("wrong"))
        with pytest.raises(ValueError, match="wrong"):
            async for piece in stream:
                seen.append(piece)
        assert seen == ["a"] and [piece async for piece in stream] == []

    asyncio.run(main())


def test_a_step_of_many_answers_is_one_wake_up(monkeypatch) -> None:
    """However many answers there are, an event loop is woken once a step and once for each end."""
    prompts = [[7 * i + 1, 5, 9, 3, 11] for i in range(8)]
    tokens = 24
    with make_engine(tiny_model("llama")) as engine:
        expected = [engine.generate(prompt, tokens, ignore_eos=True) for prompt in prompts]

        async def read(prompt: list[int]) -> str:
            async with engine.astream(prompt, tokens, ignore_eos=True) as stream:
                pieces = [piece async for piece in stream]
            assert stream.result.output_text == "".join(pieces)
            return "".join(pieces)

        async def read_all() -> tuple[list[str], int]:
            woken = count_wakes(monkeypatch)
            return await asyncio.gather(*map(read, prompts)), len(woken)

        texts, wakes = asyncio.run(read_all())
        steps = engine.serving_stats()["steps"]
        assert texts == [result.output_text for result in expected]
        assert tokens <= wakes <= steps + len(prompts)
        assert steps < tokens + 2 * len(prompts)  # the answers ran together


def test_streams_that_are_closed_early_take_nothing_from_the_others() -> None:
    prompts = [[7 * i + 1, 5, 9, 3, 11] for i in range(9)]
    with make_engine(tiny_model("llama"), max_running=9) as engine:
        expected = [engine.generate(prompt, 30, ignore_eos=True).output_text for prompt in prompts]

        async def read(number: int) -> list[str]:
            seen: list[str] = []
            async with engine.astream(prompts[number], 30, ignore_eos=True) as stream:
                async for piece in stream:
                    seen.append(piece)
                    if number % 3 == 1 and len(seen) == number:
                        break
            return seen

        async def read_all() -> list[list[str]]:
            return await asyncio.gather(*map(read, range(9)))

        for number, seen in enumerate(asyncio.run(read_all())):
            text = "".join(seen)
            assert expected[number].startswith(text)
            assert (text == expected[number]) == (number % 3 != 1)


def test_the_whole_text_arrives_before_what_was_read_is_kept(monkeypatch) -> None:
    read, kept = threading.Event(), []
    admit = Keeping.admit

    def wait_and_admit(self: Keeping, *, ended: bool = True) -> int:
        if ended:
            kept.append(read.wait(20))
        return admit(self, ended=ended)

    with make_engine(tiny_model("llama")) as engine:
        prompt = list(range(1, 60))
        text = engine.generate(prompt, 12, ignore_eos=True).output_text
        monkeypatch.setattr(Keeping, "admit", wait_and_admit)

        async def main() -> None:
            async with engine.astream(prompt, 12, ignore_eos=True) as stream:
                seen = ""
                async for piece in stream:
                    seen += piece
                    if seen == text:
                        read.set()

        asyncio.run(main())
        assert kept == [True]
