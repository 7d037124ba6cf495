from __future__ import annotations

import pytest

from kvboost.bench.texts.agent import LAYOUTS, SCRIPT, TOOLS, Session


def session(layout: str, turns: int = 20, seed: str = "0") -> Session:
    return Session(layout, turns, seed, lambda text: len(text.split()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_is_the_same_every_time_and_another_with_another_seed(layout: str) -> None:
    assert session(layout).turns == session(layout).turns != session(layout, seed="1").turns
    assert [turn.tool for turn in session(layout).turns] == list(SCRIPT)
    assert set(SCRIPT) == set(TOOLS)


def test_appended_turns_begin_with_the_turn_before() -> None:
    one = session("append")
    for turn in range(1, 20):
        before, now = (one.messages(["call"] * number) for number in (turn - 1, turn))
        assert now[: len(before)] == before and len(now) == len(before) + 2


def test_open_files_are_inserted_and_changed_before_the_history() -> None:
    one = session("files")
    for turn, done in enumerate(one.turns, start=1):
        before, now = (one.messages(["call"] * number) for number in (turn - 1, turn))
        assert now[0] == before[0]
        assert now[2 : len(before)] == before[2:]  # the history only grows
        changes = done.tool in ("read", "edit")
        assert (now[1] != before[1]) == changes
        assert all(text in now[1]["content"] for _, text in done.files)
