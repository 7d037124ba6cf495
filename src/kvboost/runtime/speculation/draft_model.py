"""A smaller model that drafts tokens."""

from __future__ import annotations

import os
import statistics
from collections import deque
from collections.abc import Sequence

import torch

from kvboost.errors import ConfigError
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment
from kvboost.model.loading import weights
from kvboost.model.loading.load import LoadedModel, load
from kvboost.model.quantized.products import is_fast
from kvboost.runtime.devices import device_of
from kvboost.runtime.request import Request
from kvboost.runtime.speculation.drafters import Drafter, Kind, Offer, TextDrafter
from kvboost.runtime.speculation.suffixes import IndexedText

READ_TOKENS = 512
"""How many of a prompt's last tokens the draft model reads. A draft need not be right."""
LEAST_LEFT = 16
"""It does not begin with a request that may get fewer tokens than this."""
EXPECTED = 0.6


class DraftModel:
    """An engine's. Thread-safe: one forward runs at a time."""

    def __init__(self, name: str | os.PathLike[str], serves: LoadedModel) -> None:
        """Loads the model that drafts for ``serves``, on the same device. Raises ConfigError if
        they have other tokens."""
        if serves.forward.states:
            raise ConfigError(
                f"draft_model={os.fspath(name)!r}: {serves.name!r} keeps states, which cannot go "
                "back to before a draft; leave draft_model out"
            )
        dtype = serves.forward.shape.dtype
        form = "packed" if _has_codes(name) and is_fast(serves.device, dtype) else "auto"
        self._model = load(name, device=serves.device, dtype=dtype, weight_form=form)
        if self._model.forward.states:
            raise ConfigError(
                f"draft_model={os.fspath(name)!r} keeps states, which cannot go back to before a "
                "draft; take a model without them"
            )
        self._vocab_size = min(serves.vocab_size, self._model.vocab_size)
        if self._model.tokenizer.vocabulary() != serves.tokenizer.vocabulary():
            raise ConfigError(
                f"draft_model={os.fspath(name)!r} has another vocabulary than {serves.name!r}; a "
                "draft model must have the same tokens, as models of one family do"
            )
        self._now = device_of(serves.device).clock
        self._seconds: deque[float] = deque(maxlen=9)
        kv = self.make_kv(1)
        for _ in range(3):
            self.next_token(kv, [0], 0)

    @property
    def context_length(self) -> int | None:
        return self._model.context_length

    @property
    def seconds(self) -> float:
        """How long drafting one token takes."""
        return statistics.median(self._seconds)

    def make_kv(self, rows: int) -> RequestKV:
        return make_kv(self._model.forward.shape, rows)

    def next_token(self, kv: RequestKV, token_ids: Sequence[int], start: int) -> int:
        """The likeliest token after ``token_ids``, whose rows begin at ``start`` of ``kv``."""
        began = self._now()
        end = start + len(token_ids)
        kv.reserve(end)
        logits = self._model.forward([Segment(kv, torch.tensor(token_ids), range(start, end))])
        token = int(logits[0, : self._vocab_size].argmax())
        if len(token_ids) == 1:
            self._seconds.append(self._now() - began)
        return token

    def make_drafters(self, request: Request, texts: Sequence[IndexedText]) -> Sequence[Drafter]:
        return [TextDrafter(request.token_ids, texts), ModelDrafter(self, request)]

    def close(self) -> None:
        self._model.forward.release()


def _has_codes(name: str | os.PathLike[str]) -> bool:
    """Whether this is a model that was installed by name, whose codes are kept beside its plain
    weights. A draft need not be right, and codes are faster."""
    return os.fspath(name) in weights.known_names()


class ModelDrafter:
    """Drafts what the draft model would answer. It has KV of its own, in which the rows of tokens
    that were drafted and did not follow are replaced."""

    def __init__(self, model: DraftModel, request: Request) -> None:
        self._model = model
        self._ids: list[int] = request.vocabulary_ids[-READ_TOKENS:].tolist()
        self._in_place: list[int] = []
        """The tokens whose rows are in the KV."""
        self._kv: RequestKV | None = None

    def push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            place = len(self._ids)
            if self._in_place[place : place + 1] != [token]:
                del self._in_place[place:]
            self._ids.append(token)

    def offer(self, most: int) -> Offer | None:
        limit = self._model.context_length
        if limit is not None:
            most = min(most, limit - len(self._ids))
        if most < 1 or (self._kv is None and most < LEAST_LEFT):
            return None
        return Offer([Kind("model", EXPECTED)] * most, self._model.seconds)

    def draft(self, count: int) -> list[int]:
        if self._kv is None:
            self._kv = self._model.make_kv(len(self._ids) + 2 * READ_TOKENS)
        drafted: list[int] = []
        start = min(len(self._in_place), len(self._ids) - 1)
        rows = self._ids[start:]
        while True:
            drafted.append(self._model.next_token(self._kv, rows, start))
            self._in_place[start:] = rows
            if len(drafted) == count:
                return drafted
            start, rows = start + len(rows), drafted[-1:]

    def foresees(self) -> list[int]:
        return []
