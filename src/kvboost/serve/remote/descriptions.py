"""What an API process must know of the engine, and does not change."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvboost.config import EngineConfig
from kvboost.results import AdapterInfo
from kvboost.serve.settings import ServerSettings

if TYPE_CHECKING:
    from kvboost import EmbeddingModel, KVBoost


@dataclass(frozen=True)
class EngineDescription:
    """The model, and how the engine runs it."""

    model_name: str
    context_length: int | None
    vocab_size: int
    eos_ids: frozenset[int]
    tokenizer: bytes
    """Pickled, which takes a while."""
    image_reader: bytes
    """What reads images, or why the model takes none; pickled."""
    config: EngineConfig
    facts: dict[str, Any]
    dimensions: int
    """Those of its embeddings."""
    adapters: dict[str, AdapterInfo]
    """Those that are loaded at first."""

    @classmethod
    def of(cls, engine: KVBoost, tokenizer: bytes) -> EngineDescription:
        return cls(
            model_name=engine.model_name,
            context_length=engine.context_length,
            vocab_size=engine.vocab_size,
            eos_ids=engine.eos_ids,
            tokenizer=tokenizer,
            image_reader=pickle.dumps(engine.image_reader),
            config=engine.config,
            facts=engine.facts(),
            dimensions=engine.embedder.dimensions,
            adapters=engine.adapters(),
        )


@dataclass(frozen=True)
class EmbeddingDescription:
    """A model for embeddings."""

    name: str
    max_tokens: int
    vocab_size: int
    dimensions: int
    tokenizer: Any

    @classmethod
    def of(cls, model: EmbeddingModel) -> EmbeddingDescription:
        return cls(
            model.name, model.max_tokens, model.vocab_size, model.dimensions, model.tokenizer
        )


@dataclass(frozen=True)
class Start:
    """What an API process begins with."""

    engine: EngineDescription
    settings: ServerSettings
    """Without a model for embeddings."""
    embedding_model: EmbeddingDescription | None

    def packed(self) -> bytes:
        return pickle.dumps(self)
