"""The part of an engine's public interface that the checks use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from kvboost.config import GenerationMode
from kvboost.results import GenerationResult, Score
from kvboost.runtime.options import RequestOptions, ReuseOptions
from kvboost.tokens.prompt import Prompt

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Engine(Protocol):
    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def context_length(self) -> int | None: ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, prompt: Prompt) -> list[int]: ...

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        mode: GenerationMode = ...,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int,
        mode: GenerationMode,
        **options: Unpack[RequestOptions],
    ) -> object: ...

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        mode: GenerationMode,
        **options: Unpack[ReuseOptions],
    ) -> Score: ...

    def forget_salt(self, cache_salt: str) -> object: ...
