"""As much of a model as a benchmark's client needs: a tokenizer that counts words, and a config."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit


def word_model(parent: Path) -> Path:
    folder = parent / "model"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"max_position_embeddings": 4096}')
    return folder
