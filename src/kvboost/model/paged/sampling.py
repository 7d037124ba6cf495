"""The next tokens of many requests at once, on the device: the rules of ``execution/sampling.py``
in batched form. A request's options are in tables on the device, in the row that it has in the
slab's table, so that a CUDA graph can read them.

A random number is a hash of the request's seed and of the token's position: the same in any batch.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import GenerationConfig

from kvboost.config import SamplingParams
from kvboost.model.execution.sampling import LEAST_TEMPERATURE, Picked, PickedSoon, chosen
from kvboost.model.triton.host import HostCopy, send, to_device

MOST_LIKELY = 256
"""If all requests of a batch have a ``top_k`` up to this, only so many tokens are sorted."""
MOST_BIASES = 300
"""Biases that a request may have on the device; OpenAI's limit."""


class Kind(NamedTuple):
    """The parts of sampling that a request needs. A batch takes what any of its requests does."""

    penalizes: bool = False
    draws: bool = False
    sorts_all: bool = False
    biases: bool = False

    def __or__(self, other: Kind) -> Kind:
        return Kind(
            self.penalizes or other.penalizes,
            self.draws or other.draws,
            self.sorts_all or other.sorts_all,
            self.biases or other.biases,
        )


GREEDY = Kind()


class TokenSampler(Protocol):
    """Picks the tokens of one request: a :class:`RowSampler` on a device, or ``Sampler`` of
    ``execution/sampling.py`` on the host."""

    def begin(self, logits: torch.Tensor, position: int, last: int) -> PickedSoon:
        """Picks the token at ``position``, after the token ``last``, given the model's logits
        ``[vocab]``."""

    def for_steps(self, *, drafted: bool) -> RowSampler | None:
        """Picks tokens in the forward that gives their logits, perhaps with ``drafted`` ones
        before them; None if the host does."""

    def note(self, token_ids: Sequence[int]) -> None:
        """Tokens that follow without having been picked here."""


class DeviceSampling:
    """The options of all running requests, by their rows in the slab's table."""

    def __init__(self, num_rows: int, num_logits: int, device: torch.device) -> None:
        self._num_rows, self._num_logits, self._device = num_rows, num_logits, device
        # temperature, top_p, min_p, penalty; draws, top_k, seed
        self._numbers = torch.ones(num_rows, 4, device=device)
        self._whole = torch.zeros(num_rows, 3, dtype=torch.int64, device=device)
        self._bias_ids = torch.zeros(num_rows, MOST_BIASES, dtype=torch.int64, device=device)
        self._biases = torch.zeros(num_rows, MOST_BIASES, device=device)
        self._biased: set[int] = set()
        """Rows with biases that are not zero."""
        self._entered: set[int] = set()
        """Rows with options of their own: the others have those of greedy requests."""
        self._seen: torch.Tensor | None = None
        self._true = torch.ones((), dtype=torch.bool, device=device)

    @torch.inference_mode()
    def register(
        self,
        row: int,
        params: SamplingParams,
        defaults: GenerationConfig,
        prompt_ids: Sequence[int] | Any,
    ) -> RowSampler | None:
        """Enters the options of a request; None if it has some that need its logits on the host's
        path: log probabilities, penalties of generated tokens, tokens that are ruled out, or too
        many biases."""
        biases = params.logit_bias or {}
        if params.logprobs is not None or params.presence_penalty or params.frequency_penalty:
            return None
        if params.rules_out:
            return None
        if len(biases) > MOST_BIASES or not all(0 <= one < self._num_logits for one in biases):
            return None
        options = chosen(params, defaults)
        kind = Kind(
            options.repetition_penalty != 1.0,
            params.samples,
            params.samples and not 0 < options.top_k <= MOST_LIKELY,
            bool(biases),
        )
        if kind == GREEDY and row not in self._entered:
            return RowSampler(self, row, kind)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        temperature = max(options.temperature, LEAST_TEMPERATURE)
        numbers = [temperature, options.top_p, options.min_p, options.repetition_penalty]
        whole = [int(params.samples), options.top_k, seed]
        self._send(row, numbers, whole, biases)
        if kind == GREEDY:
            self._entered.remove(row)
        else:
            self._entered.add(row)
        if kind.penalizes:
            seen = self._seen_tokens()
            ids = torch.from_numpy(np.array(prompt_ids, np.int64)).to(self._device)
            seen[row] = False
            seen[row, ids] = True
        return RowSampler(self, row, kind)

    def _send(
        self, row: int, numbers: list[float], whole: list[int], biases: Mapping[int, float]
    ) -> None:
        """Enters the settings of one sampler into the tables, in one copy to the device."""
        floats = np.array([*numbers, *biases.values(), 0.0][: 4 + (len(biases) + 1) // 2 * 2])
        ints = np.array([*whole, *biases], np.int64)
        sent = np.concatenate([ints, floats.astype(np.float32).view(np.int64)])
        there = send(torch.from_numpy(sent), self._device)
        values = there[len(ints) :].view(torch.float32)
        self._whole[row] = there[:3]
        self._numbers[row] = values[:4]
        if row in self._biased:
            self._biases[row].zero_()
            self._biased.remove(row)
        if biases:
            count = len(biases)
            self._bias_ids[row, :count] = there[3 : 3 + count]
            self._biases[row, :count] = values[4 : 4 + count]
            self._biased.add(row)

    def _seen_tokens(self) -> torch.Tensor:
        """Which tokens each request has read or generated; made when a request first needs it."""
        if self._seen is None:
            size = (self._num_rows, self._num_logits)
            self._seen = torch.zeros(size, dtype=torch.bool, device=self._device)
        return self._seen

    @torch.inference_mode()
    def pick(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor,
        kind: Kind,
    ) -> torch.Tensor:
        """The next tokens, int64 ``[rows]``, given ``logits``, ``[rows, vocab]``. ``rows`` are
        those of the requests, ``positions`` those that the tokens will have, ``last`` the tokens
        before them; all int64. Called again, it gives the same."""
        if kind == GREEDY:
            return logits.argmax(-1)
        scores = logits.float()
        temperature, top_p, min_p, penalty = self._numbers[rows][:, :, None].unbind(1)
        if kind.biases:
            scores = scores.scatter_add(1, self._bias_ids[rows], self._biases[rows])
        if kind.penalizes:
            seen = self._seen_tokens()
            seen.index_put_((rows, last), self._true)
            lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
            scores = torch.where(seen[rows], lowered, scores)
        token = scores.argmax(-1)
        if kind.draws:
            draws, top_k, seed = self._whole[rows].unbind(1)
            values, ids = _likeliest(scores / temperature, kind)
            kept = _kept(values, top_k[:, None], top_p, min_p)
            # In the order of tokens: what rounding does to nearly equal scores changes their order,
            # and the same number would draw another token.
            shares = torch.zeros_like(scores).scatter_(1, ids, kept)
            token = torch.where(draws > 0, _draw(shares, uniform(seed, positions)), token)
        return token


@dataclass(frozen=True)
class RowSampler:
    """Picks the tokens of one request on the device."""

    sampling: DeviceSampling
    row: int
    kind: Kind

    @torch.inference_mode()
    def begin(self, logits: torch.Tensor, position: int, last: int) -> PickedOnDevice:
        if self.kind == GREEDY:  # it needs nothing but the logits
            return PickedOnDevice(logits.argmax(-1))
        given = to_device([self.row, position, last], torch.int64, logits.device)
        row, at, before = given.view(3, 1).unbind(0)
        return PickedOnDevice(self.sampling.pick(logits[None], row, at, before, self.kind))

    def for_steps(self, *, drafted: bool) -> RowSampler | None:
        """A penalty for tokens that were seen must not see those of a draft."""
        return None if drafted and self.kind.penalizes else self

    def note(self, token_ids: Sequence[int]) -> None:
        assert not token_ids, "requests with a grammar have their tokens picked on the host"


class PickedOnDevice:
    """A token that a device picks."""

    def __init__(self, token: torch.Tensor) -> None:
        self._copy = HostCopy(token)
        self.is_done = self._copy.is_done

    def get(self) -> Picked:
        self._copy.wait()
        return int(self._copy.values), None


def _likeliest(scores: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores in descending order and their tokens; among equal scores the lowest token first, in
    any batch."""
    if kind.sorts_all:
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        return ordered.values, ordered.indices
    found = scores.topk(min(MOST_LIKELY, scores.shape[1]), dim=-1)
    ids = found.indices.sort(dim=-1).values
    ordered = scores.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return ordered.values, ids.gather(1, ordered.indices)


def _kept(
    values: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Probabilities of the tokens with these descending scores, zero for those that the options
    remove; they need not add up to one. As transformers' warpers: ``top_k`` (0 keeps all) also
    keeps what equals its last score, and the first token always stays."""
    most = values.shape[1]
    last = (top_k + (top_k <= 0) * most - 1).clamp(max=most - 1)
    values = values.masked_fill(values < values.gather(1, last), float("-inf"))
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares
    # What rounding makes of a sum must not remove a token if all are to be kept.
    keeps = ((before < top_p) | (top_p >= 1)) & (shares >= min_p * shares[:, :1])
    keeps[:, 0] = True
    return shares.masked_fill(~keeps, 0.0)


def _draw(shares: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The index of one entry of each row, int64 ``[rows]``, drawn by ``random``, ``[rows]``."""
    sums = shares.cumsum(-1)
    total = sums[:, -1:]
    last = (sums < total).sum(-1)  # rounding must not reach what was removed
    return torch.minimum((sums <= random[:, None] * total).sum(-1), last)


_STEP, _FIRST, _SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1), a hash (splitmix64) of ``seed`` and ``position``, both int64."""
    mixed = seed + (position + 1) * _STEP
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
    mixed = mixed ^ _shifted(mixed, 31)
    return _shifted(mixed, 40).float() * 2.0**-24


def _shifted(number: torch.Tensor, bits: int) -> torch.Tensor:
    """``number`` shifted right as if it had no sign."""
    return (number >> bits) & ((1 << (64 - bits)) - 1)
