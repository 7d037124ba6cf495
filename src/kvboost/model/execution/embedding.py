"""Embedding models: encoders such as all-MiniLM, as transformers runs them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from kvboost.errors import ModelError, ModelNotFoundError, PromptError
from kvboost.model.loading import weights
from kvboost.model.loading.device import pick_device

BATCH_TOKENS = 1024
"""Tokens of one forward, padding included: it takes about as long as a slice of a prompt."""

DEFAULT_MAX_TOKENS = 512
MOST_INPUTS = 64
"""Inputs of one forward."""


class EmbeddingModel:
    """Embeds texts: the mean of the last hidden states, or that of the first token if the model
    says so (``1_Pooling/config.json``), normalised to length 1. Thread-safe."""

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        pools_first: bool = False,
        max_tokens: int | None = None,
    ) -> None:
        """``pools_first``: the first token stands for the text."""
        self.name = name
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._pools_first = pools_first
        positions = model.config.to_dict().get("max_position_embeddings", DEFAULT_MAX_TOKENS)
        self.max_tokens = max_tokens or int(positions)
        """The longest input, special tokens included."""
        self.between_parts: Callable[[], None] = lambda: None
        """Called before every layer of a forward."""
        layers = max((one for one in model.modules() if isinstance(one, nn.ModuleList)), key=len)
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: self.between_parts())

    @classmethod
    def from_pretrained(
        cls, name: str | os.PathLike[str], *, device: str | torch.device | None = None
    ) -> EmbeddingModel:
        """Loads a bundled name (``all-minilm-l6-v2``), a folder or a hub id."""
        name = os.fspath(name)
        place = Path(name).expanduser()
        if not place.is_dir() and (name in weights.BUNDLED or weights.is_installed(name)):
            place = weights.pull_model(name)
        source = str(place) if place.is_dir() else name
        try:
            with weights.quiet_transformers():
                model = AutoModel.from_pretrained(source, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ModelNotFoundError(
                f"{name!r} is not an embedding model that can be loaded: {reason}. Give "
                "'all-minilm-l6-v2', a folder, or a hub id"
            ) from error
        return cls(
            name,
            model.to(pick_device(device)),
            tokenizer,
            pools_first=_pools_first(place, name),
            max_tokens=_read(place / "sentence_bert_config.json").get("max_seq_length"),
        )

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, as transformers loads it."""
        return self._tokenizer

    @property
    def dimensions(self) -> int:
        return int(self._model.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self._model.config.vocab_size)

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, with the special tokens around it."""
        ids: list[int] = self._tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return ids

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """``[texts, dimensions]``. A text of more than ``max_tokens`` raises PromptError."""
        steps = self.steps([self.encode(text) for text in texts])
        return run_steps(steps)

    def steps(
        self, batch: Sequence[Sequence[int]]
    ) -> Generator[None, None, npt.NDArray[np.float32]]:
        """The same for token ids; each ``next`` is one forward of similar lengths."""
        longest = max(map(len, batch), default=0)
        if longest > self.max_tokens:
            raise PromptError(
                f"a text has {longest:,} tokens; {self.name} takes {self.max_tokens:,}: split it"
            )
        found = np.empty((len(batch), self.dimensions), np.float32)
        for group in by_length(batch, BATCH_TOKENS, padded=True):
            yield
            found[group] = self._forward([batch[index] for index in group])
        return found

    @torch.inference_mode()
    def _forward(self, batch: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        width, device = len(batch[0]), self._model.device
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, some in enumerate(batch):
            ids[row, : len(some)] = torch.tensor(some)
            mask[row, : len(some)] = 1
        mask = mask.to(device)
        hidden = self._model(input_ids=ids.to(device), attention_mask=mask).last_hidden_state
        pooled = hidden[:, 0] if self._pools_first else (hidden * mask[:, :, None]).sum(1)
        return normalised(pooled)


def by_length(
    batch: Sequence[Sequence[int]], most: int, *, padded: bool
) -> Generator[list[int], None, None]:
    """The numbers of the inputs in groups of ``MOST_INPUTS`` at most, the longest inputs first. A
    group has ``most`` tokens at most, with those that pad it to its first if ``padded``; a longer
    input is alone."""
    group: list[int] = []
    tokens = 0
    for index in sorted(range(len(batch)), key=lambda index: -len(batch[index])):
        size = len(batch[group[0]]) if padded and group else len(batch[index])
        if group and (tokens + size > most or len(group) == MOST_INPUTS):
            yield group
            group, tokens = [], 0
            size = len(batch[index])
        group.append(index)
        tokens += size
    if group:
        yield group


def normalised(rows: torch.Tensor) -> npt.NDArray[np.float32]:
    """``rows``, each of length 1. So the mean of hidden states and their sum are the same."""
    unit: npt.NDArray[np.float32] = (
        torch.nn.functional.normalize(rows.float(), dim=-1).cpu().numpy()
    )
    return unit


def run_steps(steps: Generator[None, None, npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """All steps at once."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: npt.NDArray[np.float32] = done.value
            return result


def _pools_first(folder: Path, name: str) -> bool:
    pooling = _read(folder / "1_Pooling" / "config.json")
    chosen = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value]
    if chosen not in ([], ["pooling_mode_mean_tokens"], ["pooling_mode_cls_token"]):
        raise ModelError(f"{name!r} pools by {', '.join(chosen)}; only mean and cls are supported")
    return chosen == ["pooling_mode_cls_token"]


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
