"""Graphs that are recorded when an engine starts."""

from __future__ import annotations

import pytest

from kvboost.model import triton
from support.live_server import wait_for
from support.paged_engines import leaks, paged_engine, steps_of
from support.replay_again import ReplayAgain
from support.tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from support.torch_kernels import use_torch_kernels

TEXT = "A request that comes first finds its graphs."


def test_the_first_requests_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ReplayAgain()
    monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: capture)
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)
    with paged_engine(monkeypatch, "gpt2", pages=False) as plain:
        expected = plain.generate(TEXT, 3, ignore_eos=True).token_ids
    with paged_engine(monkeypatch, "gpt2") as engine:
        # Steps of 1, 2 and 4 rows are two graphs each; forwards have one size on CPUs.
        assert engine.runtime.backend.record_graphs(3) == 7
        assert capture.names[0] == "rows of prompts", "the largest is not the first"
        assert leaks(engine) == []
        assert engine.generate(TEXT, 3, ignore_eos=True).token_ids == expected
        known = engine.generate(TEXT + TEXT, 3, ignore_eos=True)
        assert known.exact_tokens > 16
        assert capture.num_graphs == 7 and steps_of(engine).num_steps > 3


def test_recording_ends_where_the_memory_for_graphs_does(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ReplayAgain()
    monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: capture)
    monkeypatch.setattr(
        ReplayAgain, "has_room", property(lambda self: self.num_graphs < 2), raising=True
    )
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)
    with paged_engine(monkeypatch, "gpt2") as engine:
        assert engine.runtime.backend.record_graphs(3) == 3


def test_idle_time_records_what_requests_have_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = ReplayAgain()
    monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: capture)
    with paged_engine(monkeypatch, "gpt2") as engine:
        backend = engine.runtime.backend
        recorded = backend.record_graphs(1)
        engine.generate(TEXT, 1, ignore_eos=True)
        (later,) = engine.generate_batch([TEXT + TEXT[:20]], 1, ignore_eos=True)
        assert later.exact_tokens > 16
        wait_for(lambda: capture.num_graphs == recorded + 1 and not backend.lacks_graphs)
