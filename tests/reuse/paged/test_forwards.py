"""Rows of one request through buffers of fixed size, against packed forwards over buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvboost import KVBoost
from kvboost.model import triton
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.segment import Hook, Segment
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.slab import PAGE, SCRATCH, Slab
from kvboost.reuse.probe import AttentionMass
from kvboost.reuse.repair import probed_layers
from kvboost.reuse.request import BufferedRows
from kvboost.reuse.shift import Spans
from kvboost.runtime.paged_backend import PagedBackend
from support.forwards import count_forwards
from support.paged_engines import SMALL, SMALL_FORWARDS, TWO_LAYERS, paged_engine, paged_kv
from support.replay_again import ReplayAgain
from support.tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from kvboost.reuse.paged.forwards import SegmentForwards
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, ROWS, SCORED
from kvboost.reuse.paged.request import PagedRequest

MOST_APART = 4
PROMPT = 60
CLOSE = {"rtol": 1e-3, "atol": 1e-4 if DEVICE == "cpu" else 1e-3}
IDS = torch.randint(0, 256, (PROMPT,), generator=torch.Generator().manual_seed(1))
SPANS = Spans.of([range(5, 25), range(25, 45)], PROMPT)


class Two:
    """The same request in pages and in a buffer. Both have KV of other text in some rows."""

    def __init__(self, engine: KVBoost, monkeypatch: pytest.MonkeyPatch, refused: str = "") -> None:
        backend, shape = engine.runtime.backend, engine.model.forward.shape
        assert isinstance(backend, PagedBackend)
        self.capture = ReplayAgain(refused)
        monkeypatch.setattr("kvboost.runtime.paged_backend.make_capture", lambda *_: self.capture)
        slab = Slab(shape, num_pages=12, num_requests=3)
        slab.data[:, SCRATCH + 1 :] = float("nan")
        slab.take(20)
        backend._use_slab(slab)
        self.backend, self.forward = backend, backend.forward
        self.paged, self.plain = paged_kv(slab, PROMPT), RequestKV(shape, PROMPT)
        rows = torch.randn(self.plain.data[:, :, :, :45].shape).to(DEVICE)
        for kv in (self.paged, self.plain):
            with kv.filling(0, 45) as known:
                known.copy_(rows)

    @property
    def forwards(self) -> SegmentForwards:
        assert self.backend.forwards is not None
        return self.backend.forwards

    def logits(self, kv: RequestKV, rows: range | torch.Tensor, **options: object) -> torch.Tensor:
        at = torch.arange(rows.start, rows.stop) if isinstance(rows, range) else rows
        ids = IDS[at.cpu()].to(kv.positions_on)
        (found,) = self.forward.run([Segment(kv, ids, rows, **options)])
        assert isinstance(found, torch.Tensor)
        return found

    def check(self, rows: range | torch.Tensor) -> None:
        """Runs rows in both; logits and KV must be the same."""
        runs = self.forwards.num_runs
        found, expected = self.logits(self.paged, rows), self.logits(self.plain, rows)
        assert self.forwards.num_runs == runs + 1
        torch.testing.assert_close(found, expected, **CLOSE)
        self.compare(int(rows[-1]) + 1)

    def compare(self, end: int) -> None:
        torch.testing.assert_close(self.paged.rows(0, end), self.plain.rows(0, end), **CLOSE)


NAMES = ["qwen2", "gemma2"] if DEVICE == "cpu" else ["qwen2", "qwen3", "gemma2", "gemma3_text"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_after_known_ones_are_those_of_a_packed_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consecutive, then fewer and with gaps: the buffers keep nothing of the last forward."""
    sizes = SMALL if name == "qwen2" else TWO_LAYERS  # gemma2 has windows in every second layer
    two = Two(paged_engine(monkeypatch, name, sizes=sizes), monkeypatch)
    two.check(range(45, PROMPT))
    two.check(torch.tensor([3, 4, 20, 50, 59]))
    assert two.capture.names == [ROWS] and two.capture.replays == 2
    for tail, scored in ((range(45, PROMPT), 9), (range(58, PROMPT), 2), (range(50, 53), 3)):
        found = two.logits(two.paged, tail, num_logits=scored)
        assert len(found) == scored
        expected = two.logits(two.plain, tail, num_logits=scored)
        torch.testing.assert_close(found, expected, **CLOSE)
    assert two.capture.names == [ROWS, SCORED] and two.capture.replays == 5
    none = two.logits(two.paged, range(45, 50), num_logits=0)
    assert none.shape == (0, two.logits(two.plain, range(45, 50)).shape[1])
    assert two.forwards.note is None


@pytest.mark.parametrize("name", ["qwen2"] if DEVICE == "cpu" else ["qwen2", "phi3"])
def test_a_repair_shifts_as_over_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With layers of ours, which write rows themselves, and with the model's own."""
    two = Two(paged_engine(monkeypatch, name, sizes=TWO_LAYERS), monkeypatch)
    backend, rows = two.backend, torch.tensor([5, 9, 13, 30, 31, 44, *range(45, PROMPT)])
    before = two.plain.data.clone()
    buffered = BufferedRows(two.plain, backend.packer, backend.rotation)
    paged = backend.rows_of(two.paged)
    assert isinstance(paged, PagedRequest)
    found = two.logits(two.paged, rows, hook=paged.shift(rows.numpy(), SPANS))
    on_device = rows.to(DEVICE)
    shift = buffered.shift(rows.numpy(), SPANS)
    assert shift is not None
    expected = two.logits(two.plain, on_device, hook=shift)
    torch.testing.assert_close(found, expected, **CLOSE)
    two.compare(PROMPT)
    assert not torch.equal(two.plain.rows(6, 9), before[:, :, :, 6:9])
    assert two.capture.names == [REPAIRS] and two.forwards.num_runs == 1
    assert paged.shift(np.array([50]), SPANS) is None


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gemma3_text"])
def test_a_probe_sees_what_it_sees_over_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 46 to 49 are not known: they hold NaN in pages."""
    two = Two(paged_engine(monkeypatch, name, sizes=TWO_LAYERS), monkeypatch)
    paged, until = two.backend.rows_of(two.paged), probed_layers(2).last
    absent = torch.zeros(PROMPT, dtype=torch.bool)
    absent[45:50] = True
    tail = torch.arange(50, PROMPT)
    seen = []
    for kv, device in ((two.paged, "cpu"), (two.plain, DEVICE)):
        mass = AttentionMass(probed_layers(2), absent[:50].to(device))
        hook = paged.probe(mass, tail) if kv is two.paged else mass
        rows = tail.to(device)
        options = {"hook": hook, "until": until, "absent": absent.to(device)}
        assert not len(two.logits(kv, rows, num_logits=0, **options))
        mass.wait()
        seen.append(mass.mass.cpu())
    torch.testing.assert_close(*seen, rtol=1e-3, atol=1e-5)
    assert float(seen[0].sum()) > 1 and not seen[0][..., 45:].any()
    assert two.capture.names == [PROBES] and two.forwards.num_runs == 1


def test_probes_without_a_graph_share_a_forward_with_other_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as those of a request with an adapter. A hook over pages ends the forward of no other
    segment."""
    two = Two(paged_engine(monkeypatch, "qwen2", sizes={"num_hidden_layers": 4}), monkeypatch)
    forward, last = two.forward, probed_layers(4).last
    assert isinstance(forward, PagedForward)
    forward.runner = None
    sizes = count_forwards(two.backend.model.forward, monkeypatch)
    tail, absent = torch.arange(50, PROMPT), torch.zeros(PROMPT, dtype=torch.bool)
    absent[45:50] = True
    other = paged_kv(two.paged.slab, PROMPT)
    with other.filling(0, 45) as rows:
        rows.copy_(two.plain.rows(0, 45))

    def probe(kv: RequestKV) -> tuple[AttentionMass, Segment]:
        mass = AttentionMass(probed_layers(4), absent[:50])
        hook = two.backend.rows_of(kv).probe(mass, tail)
        options = {"until": last, "absent": absent, "may_go_on": True}
        return mass, Segment(kv, IDS[tail], tail, 0, hook=hook, **options)

    expected, alone = probe(two.plain)
    two.forward.run([alone])
    first, probing = probe(two.paged)
    second, also = probe(other)
    forward.run([probing, also])
    rows = Segment(other, IDS[45:50], range(45, 50))
    third, again = probe(two.paged)
    _, logits = forward.run([again, rows])
    assert sizes == [1, 2, 2]
    for mass in (first, second, third):
        mass.wait()
        torch.testing.assert_close(mass.mass.cpu(), expected.mass.cpu(), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(logits, two.logits(two.plain, range(45, 50)), **CLOSE)


def test_what_does_not_fit_runs_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(paged_engine(monkeypatch, "phi3"), monkeypatch)
    takes, kv = two.forwards.takes, two.paged

    def segment(kv: RequestKV, rows: range, **options: object) -> Segment:
        return Segment(kv, torch.zeros(len(rows), dtype=torch.int64), rows, **options)

    tail = range(45, PROMPT)
    assert takes(segment(kv, tail))
    assert not takes(segment(two.plain, tail))
    assert not takes(segment(kv, tail, as_stock=True))
    assert takes(segment(kv, tail, num_logits=2))
    assert not takes(segment(kv, range(70), num_logits=65))
    assert not takes(segment(kv, tail, hook=Hook()))
    assert not takes(segment(kv, tail, until=0))
    assert not takes(segment(kv, range(65)))  # too many rows, and not all of them have pages
    kv.reserve(PAGE + 9)
    kv.share(PAGE + 9)
    assert kv.own_start == PAGE
    assert not takes(segment(kv, range(PAGE - 1, PAGE + 9)))
    assert takes(segment(kv, range(PAGE, PAGE + 9)))
    assert two.forwards.num_runs == 0


def test_forwards_that_fail_at_first_are_left_to_the_packed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two(paged_engine(monkeypatch, "phi3"), monkeypatch)
    two.forwards._heads = 2  # not those of the model
    tail = range(45, PROMPT)
    found = two.logits(two.paged, tail)
    torch.testing.assert_close(found, two.logits(two.plain, tail), **CLOSE)
    assert two.forwards.num_runs == 0 and "rows of prompts run eagerly" in str(two.forwards.note)
    assert not two.forwards.takes(Segment(two.paged, IDS[45:], tail))


def test_forwards_that_cannot_be_captured_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(paged_engine(monkeypatch, "phi3"), monkeypatch, refused=ROWS)
    two.check(range(45, PROMPT))
    two.check(range(50, PROMPT))
    assert two.capture.names == []


def test_rows_run_in_a_larger_graph_while_their_own_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = Two(paged_engine(monkeypatch, "phi3"), monkeypatch)
    small, large = SMALL_FORWARDS
    forward = two.forward
    assert isinstance(forward, PagedForward)
    forward.exclusively(lambda: two.forwards.record(ROWS, large))
    two.check(range(45, PROMPT))
    assert len(two.capture.names) == 1 and two.forwards.size_for(ROWS, PROMPT - 45) == small
    assert two.backend.lacks_graphs
    two.backend.record_missing()
    assert len(two.capture.names) == 2 and not two.backend.lacks_graphs
    before = two.capture.replays
    two.check(range(50, PROMPT))
    assert len(two.capture.names) == 2 and two.capture.replays == before + 1


def test_many_segments_are_packed_and_those_with_hooks_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvboost.model.paged.forward.MOST_APART", MOST_APART)
    two = Two(paged_engine(monkeypatch, "phi3", sizes=TWO_LAYERS), monkeypatch)
    repaired = torch.tensor([5, 9, 13, 30, 31, 44])
    hook = two.backend.rows_of(two.paged).shift(repaired.numpy(), SPANS)
    shifting = Segment(two.paged, IDS[repaired], repaired, hook=hook)
    tails = [
        Segment(two.paged, IDS[start:PROMPT], range(start, PROMPT))
        for start in range(45, 46 + MOST_APART)
    ]
    assert all(map(two.forwards.takes, [shifting, *tails]))
    found = two.forward.run([tails[0], shifting, *tails[1:]])
    assert two.forwards.num_runs == 1 and two.capture.names == [REPAIRS]
    two.forward.run(tails[:MOST_APART])
    assert two.forwards.num_runs == 1 + MOST_APART
    assert len(found) == 2 + MOST_APART


def test_graphs_are_of_the_adapters_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Two(paged_engine(monkeypatch, "phi3"), monkeypatch)
    two.check(range(45, PROMPT))
    two.forward._adapters = ("another",)  # type: ignore[union-attr]
    two.check(range(45, PROMPT))
    assert two.capture.names == [ROWS, ROWS]
