"""Makes embeddings, between the steps that compute answers."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt

import kvboost
from kvboost.serve.answers.prompts import beginning
from kvboost.serve.errors import ApiError

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """A model that embeds token ids, one slice per ``next`` of :meth:`steps`."""

    @property
    def dimensions(self) -> int: ...

    def steps(self, batch: Sequence[Sequence[int]]) -> Generator[None, None, Vectors]: ...


class Embedder:
    """Embeds the inputs of requests."""

    def __init__(self, engine: kvboost.KVBoost, own: kvboost.EmbeddingModel | None) -> None:
        """``own`` is a model made for it; without one, the engine's model embeds."""
        self._engine = engine
        self._own = own
        self.max_tokens = engine.context_length if own is None else own.max_tokens
        self.vocab_size = engine.vocab_size if own is None else own.vocab_size
        if own is not None:
            own.between_parts = engine.answer_meanwhile

    @property
    def dimensions(self) -> int:
        return self._encoder.dimensions

    def encode(self, text: str, most: int | None) -> list[int]:
        """The token ids of ``text``, or the first ``most`` of them. For a thread: a long text takes
        a while, but of one that is too long no more is read than decides that."""
        encode = self._engine.encode if self._own is None else self._own.encode
        enough = self.max_tokens if most is None else most
        if enough is not None:
            text = beginning(text, enough, encode)
        return self.truncate(encode(text), most)

    def truncate(self, ids: list[int], most: int | None) -> list[int]:
        """The first ``most`` tokens, the special token that ends every text included."""
        if most is None or len(ids) <= most:
            return ids
        return ids[:most] if self._own is None else [*ids[: most - 1], ids[-1]]

    def check(self, batch: Sequence[Sequence[int]]) -> None:
        """Raises ApiError 400 if the model cannot embed some input."""
        for number, ids in enumerate(batch):
            if self.max_tokens is not None and len(ids) > self.max_tokens:
                said = f"input {number} has {len(ids):,} tokens or more; the model takes "
                said += f"{self.max_tokens:,}: split it, or set truncate_prompt_tokens to -1 "
                said += "(in Ollama's API: truncate to true)"
                raise ApiError(400, said, "context_length_exceeded", "input")
            if (last := max(ids)) >= self.vocab_size:
                said = f"input {number} has token id {last:,}; the model has {self.vocab_size:,}"
                raise ApiError(400, said, "invalid_value", "input")

    async def embed(self, batch: Sequence[Sequence[int]]) -> Vectors:
        """``[inputs, dimensions]``, each of length 1. Answers of other requests go on: each waits
        for one slice per token at most. Equal inputs are embedded once."""
        distinct, rows = await asyncio.to_thread(_distinct, batch)
        steps = self._encoder.steps(distinct)
        try:
            while True:
                work = partial(advance, steps)
                done = await asyncio.wrap_future(self._engine.between_steps(work))
                if done is not None:
                    return done[rows]
        finally:
            steps.close()

    @property
    def _encoder(self) -> Encoder:
        return self._engine.embedder if self._own is None else self._own


def _distinct(batch: Sequence[Sequence[int]]) -> tuple[list[tuple[int, ...]], list[int]]:
    """The inputs that differ, and which of them each input is."""
    places: dict[tuple[int, ...], int] = {}
    rows = [places.setdefault(tuple(ids), len(places)) for ids in batch]
    return list(places), rows


def advance(steps: Generator[None, None, Vectors]) -> Vectors | None:
    """One step; its result is that of the last."""
    try:
        next(steps)
    except StopIteration as done:
        result: Vectors = done.value
        return result
    return None
