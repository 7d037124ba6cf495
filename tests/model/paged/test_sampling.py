"""Sampling for many requests at once, against transformers' own processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from kvboost.config import SamplingParams
from kvboost.model.execution.sampling import Sampler
from kvboost.model.paged.sampling import DeviceSampling, Kind, RowSampler, uniform
from support.tiny import DEVICE

VOCAB = 400
PROMPT = [3, 7, 7, 11]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy with a penalty": {"repetition_penalty": 1.7},
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5, "temperature": 2.0},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2, "temperature": 3.0},
    "biases": {"logit_bias": {7: -100.0, 3: 4.0, 399: 6.5}},
    "drawn with biases": {"logit_bias": {5: 3.0, 6: -100.0}, "temperature": 1.5},
    "all": {"top_k": 50, "top_p": 0.8, "temperature": 0.9, "repetition_penalty": 1.3},
}


def sampler_of(sampling: DeviceSampling, row: int, **options: Any) -> RowSampler:
    params = SamplingParams(**{"seed": row, **options})
    found = sampling.register(row, params, GenerationConfig(), PROMPT)
    assert found is not None
    return found


def pick(
    sampling: DeviceSampling, samplers: list[RowSampler], logits: torch.Tensor, position: int
) -> list[int]:
    """The tokens of all samplers in one call."""
    kind = Kind()
    for sampler in samplers:
        kind = kind | sampler.kind
    rows = torch.tensor([sampler.row for sampler in samplers], device=DEVICE)
    last = torch.full_like(rows, PROMPT[-1])
    positions = torch.full_like(rows, position)
    return sampling.pick(logits, rows, positions, last, kind).tolist()


def peaked(count: int) -> torch.Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3).to(DEVICE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_those_that_transformers_may_draw(options: dict[str, Any]) -> None:
    """Many draws reach all likely tokens, as often as transformers' processors allow."""
    sampling = DeviceSampling(3, VOCAB, torch.device(DEVICE))
    sampler = sampler_of(sampling, 1, **options)
    logits = peaked(1)
    count = 3000
    drawn = pick(sampling, [sampler] * count, logits.expand(count, -1), 0)  # one position
    assert len(set(drawn)) == 1
    rows = torch.ones(count, dtype=torch.int64, device=DEVICE)
    last = torch.full_like(rows, PROMPT[-1])
    positions = torch.arange(count, device=DEVICE)
    expanded = logits.expand(count, -1)
    drawn = sampling.pick(expanded, rows, positions, last, sampler.kind).tolist()
    shares = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / count

    stock = Sampler(SamplingParams(**options), GenerationConfig(), PROMPT, torch.device(DEVICE))
    scores = logits.clone()
    for process in stock._processors:
        scores = process(torch.tensor([PROMPT], device=DEVICE), scores)
    if not SamplingParams(**options).samples:
        assert set(drawn) == {int(scores.argmax())}
        return
    expected = scores.softmax(-1)[0].cpu()
    assert not shares[expected == 0].any()
    assert (shares - expected).abs().max() < 0.04
    assert shares[expected > 0.01].all()


def test_a_seed_gives_the_same_tokens_in_any_batch() -> None:
    sampling = DeviceSampling(len(OPTIONS) + 1, VOCAB, torch.device(DEVICE))
    each = [
        sampler_of(sampling, row + 1, **options) for row, options in enumerate(OPTIONS.values())
    ]
    logits = peaked(len(each))
    together = [pick(sampling, each, logits, position) for position in range(20)]
    for index, sampler in enumerate(each):
        alone = [
            sampler.begin(logits[index], position, PROMPT[-1]).get()[0] for position in range(20)
        ]
        assert alone == [tokens[index] for tokens in together]
    assert len({tuple(tokens) for tokens in together}) > 10


def test_rows_and_seeds_matter_but_the_row_of_a_request_does_not() -> None:
    sampling = DeviceSampling(9, VOCAB, torch.device(DEVICE))
    logits = peaked(1)[0]

    def draw(row: int, seed: int | None) -> list[int]:
        sampler = sampler_of(sampling, row, temperature=2.0, seed=seed)
        return [sampler.begin(logits, position, 0).get()[0] for position in range(30)]

    assert draw(1, 5) == draw(7, 5) != draw(1, 6)
    assert draw(1, None) != draw(1, None)


def test_a_penalty_covers_prompt_and_answer() -> None:
    sampling = DeviceSampling(3, VOCAB, torch.device(DEVICE))
    logits = torch.zeros(VOCAB, device=DEVICE)
    logits[[7, 20, 30]] = torch.tensor([3.0, 2.5, 2.0], device=DEVICE)
    sampler = sampler_of(sampling, 1, repetition_penalty=2.0)
    first, _ = sampler.begin(logits, 4, PROMPT[-1]).get()
    second, _ = sampler.begin(logits, 5, first).get()
    again, _ = sampler.begin(logits, 5, first).get()
    assert (first, second, again) == (20, 30, 30)
    fresh = sampler_of(sampling, 1, repetition_penalty=2.0)  # another request in the same row
    assert fresh.begin(logits, 4, PROMPT[-1]).get()[0] == 20


@pytest.mark.parametrize("option", ["logprobs", "presence_penalty", "frequency_penalty"])
def test_what_needs_logits_is_left_to_the_host(option: str) -> None:
    sampling = DeviceSampling(3, VOCAB, torch.device(DEVICE))
    params = SamplingParams(**{option: 1})
    assert sampling.register(1, params, GenerationConfig(), PROMPT) is None


def test_a_bias_ends_with_its_request() -> None:
    sampling = DeviceSampling(3, VOCAB, torch.device(DEVICE))
    logits = peaked(1)[0]
    likeliest = int(logits.argmax())
    biased = sampler_of(sampling, 1, logit_bias={likeliest: -100.0})
    assert biased.begin(logits, 4, 0).get()[0] != likeliest
    fresh = sampler_of(sampling, 1)
    together = pick(sampling, [fresh, sampler_of(sampling, 2, logit_bias={9: 1.0})], peaked(2), 4)
    assert together[0] == fresh.begin(logits, 4, 0).get()[0] == likeliest
    assert (
        sampling.register(1, SamplingParams(logit_bias={VOCAB: 1.0}), GenerationConfig(), [])
        is None
    )


@pytest.mark.parametrize("before", OPTIONS.values(), ids=OPTIONS)
def test_a_greedy_request_is_greedy_beside_any_other(before: dict[str, Any]) -> None:
    """In a row that had a request with other options, in one that had a greedy one, and in one that
    had none."""
    sampling = DeviceSampling(4, VOCAB, torch.device(DEVICE))
    sampler_of(sampling, 1, **before)
    sampler_of(sampling, 2)
    other = sampler_of(sampling, 3, **OPTIONS["all"])
    logits = peaked(4)
    for _ in range(2):
        greedy = [sampler_of(sampling, row, temperature=0.0) for row in (1, 2)]
        samplers = [*greedy, other, RowSampler(sampling, 0, Kind())]
        drawn = [pick(sampling, samplers, logits, position) for position in range(20)]
        for index in (0, 1, 3):
            assert {tokens[index] for tokens in drawn} == {int(logits[index].argmax())}
        sampler_of(sampling, 1, **before)


def test_random_numbers_are_uniform() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1], device=DEVICE)[:, None]
    numbers = uniform(seeds, torch.arange(20_000, device=DEVICE)[None])
    assert numbers.min() >= 0 and numbers.max() < 1
    for row in numbers:
        counts = torch.histc(row.cpu(), bins=10, min=0, max=1)
        assert (counts - 2000).abs().max() < 250
    assert abs(float(torch.corrcoef(numbers.cpu())[0, 1])) < 0.05


def test_the_likeliest_token_needs_nothing_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, sent = peaked(1)[0], []
    sampler = sampler_of(DeviceSampling(3, VOCAB, torch.device(DEVICE)), 1)
    monkeypatch.setattr("kvboost.model.paged.sampling.to_device", lambda *args: sent.append(args))
    assert sampler.begin(logits, 9, 4).get() == (int(logits.argmax()), None) and not sent
