"""The setting that every engine of a run is told, and the model's vocabulary."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvboost import pull_model
from kvboost.model.loading.device import pick_dtype

CPU_CACHE, GPU_CACHE = 2 * 1024**3, 16 * 1024**3


@dataclass(frozen=True)
class Setting:
    """The setting that is the same for all engines of a run."""

    model: str
    folder: Path
    """The model's weights in the form of transformers."""
    users: int
    threads: int
    context_length: int
    cache_bytes: int = CPU_CACHE
    """For KV that may come back."""
    device: str = "cpu"
    dtype: str = "bfloat16"
    vllm: str | None = None
    """A Python that has vLLM for the device; None if it is that of ``make peers``, for CPUs."""


@dataclass(frozen=True)
class Vocabulary:
    """The model's tokenizer, as far as a client needs it. Adds nothing to a text."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    special_ids: tuple[int, ...]

    @classmethod
    def of(cls, folder: Path) -> Vocabulary:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        added = tokenizer.get_added_tokens_decoder()
        return cls(
            lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids),
            lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            tuple(sorted(number for number, token in added.items() if token.special)),
        )

    def count(self, text: str) -> int:
        return len(self.encode(text))


def prepare(
    model: str,
    users: int = 1,
    *,
    threads: int | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    vllm: str | None = None,
) -> tuple[Setting, Vocabulary]:
    """Fetches the model if it is missing, and reads its context length and tokenizer. Without a
    device and a dtype, engines run on the CPU in what suits it. On a GPU there is more room for KV,
    as there is more memory."""
    device = device or torch.device("cpu")
    kind = str(dtype or pick_dtype(None, device)).removeprefix("torch.")
    folder = Path(model) if Path(model).is_dir() else pull_model(model)
    config = json.loads((folder / "config.json").read_text())
    context = int(config["max_position_embeddings"])
    threads = threads or os.cpu_count() or 1
    room = CPU_CACHE if device.type == "cpu" else GPU_CACHE
    setting = Setting(model, folder, users, threads, context, room, str(device), kind, vllm)
    return setting, Vocabulary.of(folder)
