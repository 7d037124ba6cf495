"""Where a model lies and how it counts: what any engine of a comparison is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from kvboost import pull_model
from kvboost.bench.peers.base import Setting


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
    device: str = "cpu",
    dtype: str = "bfloat16",
) -> tuple[Setting, Vocabulary]:
    """Where the model lies, what it holds, and how it counts."""
    folder = Path(model) if Path(model).is_dir() else pull_model(model)
    config = json.loads((folder / "config.json").read_text())
    setting = Setting(
        model,
        folder,
        users,
        threads=threads or os.cpu_count() or 1,
        context_length=int(config["max_position_embeddings"]),
        device=device,
        dtype=dtype,
    )
    return setting, Vocabulary.of(folder)
