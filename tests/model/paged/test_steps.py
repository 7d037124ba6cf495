"""Decode steps through static buffers, launched ahead, against one forward per row."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from kvboost import KVBoost
from kvboost.config import SamplingParams
from kvboost.model.execution.segment import Segment
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.sampling import RowSampler
from kvboost.model.paged.slab import SCRATCH, Slab
from kvboost.model.paged.steps import Steps, bucket_of
from support.paged_engines import paged_engine, paged_kv
from support.replay_again import ReplayAgain

GREEDY = SamplingParams()


class Requests:
    """Requests in a slab of their own, which have read their prompts."""

    def __init__(self, engine: KVBoost, num_requests: int, capture: ReplayAgain) -> None:
        forward = engine.model.forward
        self.capture = capture
        self.slab = Slab(forward.shape, num_pages=4 * num_requests, num_requests=num_requests)
        self.whole, self.forward = forward, PagedForward(forward, self.slab, capture)
        self.kvs: list[PagedKV] = []
        self.samplers: list[RowSampler] = []
        self.ids: list[list[int]] = []

    @property
    def steps(self) -> Steps:
        return self.forward.steps

    def start(self, length: int, params: SamplingParams = GREEDY) -> int:
        """Reads a prompt and picks the first token; returns the number of the request."""
        ids = [(7 * length + 3 * index) % 256 for index in range(length)]
        kv = paged_kv(self.slab, length + 20)
        sampler = self.forward.sampler(kv, params, GenerationConfig(), ids)
        assert isinstance(sampler, RowSampler)
        (logits,) = self.forward.run([Segment(kv, torch.tensor(ids), range(length))])
        assert isinstance(logits, torch.Tensor)
        ids.append(sampler.begin(logits[-1], length, ids[-1]).get()[0])
        self.kvs.append(kv)
        self.samplers.append(sampler)
        self.ids.append(ids)
        return len(self.ids) - 1

    def step(self, *numbers: int, ahead: bool = True) -> None:
        """The next token of these requests; of those that join others, on its way."""
        segments = [
            Segment(
                self.kvs[number],
                torch.tensor(self.ids[number][-1:]),
                range(len(self.ids[number]) - 1, len(self.ids[number])),
                sampler=self.samplers[number],
                ahead=ahead,
            )
            for number in numbers
        ]
        for number, found in zip(numbers, self.forward.run(segments), strict=True):
            if found is not None:
                assert isinstance(found, tuple)
                self.ids[number].append(found[0])

    def expected(self, number: int, prompt: int) -> list[int]:
        """Its greedy tokens by whole forwards."""
        ids = self.ids[number][:prompt]
        while len(ids) < len(self.ids[number]):
            kv = paged_kv(self.slab, len(ids))
            ids.append(int(self.whole([Segment(kv, torch.tensor(ids), range(len(ids)))]).argmax()))
            self.slab.release(kv.holding)
        return ids


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(paged_engine(monkeypatch, pages=False), 6, ReplayAgain())


def test_requests_join_and_leave_while_steps_are_launched_ahead(requests: Requests) -> None:
    first, second = requests.start(30), requests.start(9)
    requests.step(first, second)
    requests.step(first, second)  # already launched
    assert (requests.steps.num_steps, requests.steps.num_ahead) == (3, 2)
    third = requests.start(17)
    requests.step(first, second, third)  # the step after this one is the third's first
    assert (requests.steps.num_steps, requests.steps.num_ahead) == (4, 3)
    assert len(requests.ids[third]) == 18
    requests.step(third, first)
    requests.step(first, third, ahead=False)
    assert requests.steps.num_steps == 5
    for number, prompt in ((first, 30), (second, 9), (third, 17)):
        assert requests.ids[number] == requests.expected(number, prompt)
    assert (len(requests.ids[first]), len(requests.ids[third])) == (36, 20)
    padding = requests.steps.lengths[SCRATCH], requests.slab.table[SCRATCH]
    assert not any(part.any() for part in padding)


def test_a_capture_is_made_once_and_the_buffers_stay(requests: Requests) -> None:
    first, second = requests.start(8), requests.start(5)
    for _ in range(3):
        requests.step(first, second)
    bucket = requests.steps.buckets[2, False, False]
    places = [
        part.data_ptr() for part in (bucket.rows, bucket.positions, bucket.ids, bucket.picked)
    ]
    third = requests.start(6)
    for _ in range(2):
        requests.step(second, third)
    assert len(requests.capture.captured) == 2  # model and sampling, for two rows
    assert requests.capture.replays == 2 * requests.steps.num_steps
    assert places == [
        part.data_ptr() for part in (bucket.rows, bucket.positions, bucket.ids, bucket.picked)
    ]
    for number, prompt in ((first, 8), (second, 5), (third, 6)):
        assert requests.ids[number] == requests.expected(number, prompt)


def test_sampling_is_captured_although_the_model_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits stay where they were when it was captured, and are those of the step."""
    capture = ReplayAgain(refused="the model")
    requests = Requests(paged_engine(monkeypatch, pages=False), 2, capture)
    first = requests.start(8)
    places, logits = set(), []
    for _ in range(3):
        requests.step(first, ahead=False)
        bucket = requests.steps.buckets[1, False, False]
        places.add(bucket.logits.data_ptr())
        logits.append(bucket.logits.clone())
    assert len(capture.captured) == 1 and capture.replays == 3
    assert len(places) == 1 and not torch.equal(logits[0], logits[1])
    assert requests.ids[first] == requests.expected(first, 8)


def test_a_row_of_the_table_that_another_request_takes_over(requests: Requests) -> None:
    """What was launched for the request before is not its result."""
    first = requests.start(12)
    requests.step(first)
    row = requests.kvs[first].holding.row
    requests.slab.release(requests.kvs[first].holding)
    second = requests.start(12 + 1)
    assert requests.kvs[second].holding.row == row
    requests.step(second)
    assert requests.ids[second] == requests.expected(second, 13)


def test_logits_are_given_to_those_that_ask_for_them(requests: Requests) -> None:
    first, second = requests.start(10), requests.start(11)
    requests.step(first, second)
    ids = requests.ids[second]
    segments = [
        Segment(
            requests.kvs[first],
            torch.tensor(requests.ids[first][-1:]),
            range(11, 12),
            sampler=requests.samplers[first],
            ahead=True,
        ),
        Segment(requests.kvs[second], torch.tensor(ids[-1:]), range(12, 13)),
    ]
    picked, logits = requests.forward.run(segments)
    assert isinstance(logits, torch.Tensor) and logits.shape[0] == 1
    assert not isinstance(picked, torch.Tensor)
    requests.ids[first].append(picked[0])
    ids.append(int(logits.argmax()))
    requests.step(first, second)
    for number, prompt in ((first, 10), (second, 11)):
        assert requests.ids[number] == requests.expected(number, prompt)


def test_buckets_hold_their_requests_without_much_padding() -> None:
    sizes = [bucket_of(count) for count in range(1, 300)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(count <= size for count, size in enumerate(sizes, 1))
    assert {64, 128, 256} <= set(sizes) and sizes == sorted(sizes)
    assert len({size for size in sizes if size <= 256}) <= 16
