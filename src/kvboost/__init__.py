"""KVBoost: a language model should never read the same text twice."""

from importlib import import_module
from typing import TYPE_CHECKING

from kvboost.config import EngineConfig, GenerationMode, KVEvents
from kvboost.errors import (
    AdapterError,
    AdapterNotFoundError,
    CacheFolderError,
    ChecksumError,
    ConfigError,
    ContextLengthError,
    ForgetError,
    ImageError,
    KVBoostError,
    KVTooLargeError,
    ModelError,
    ModelNotFoundError,
    PinError,
    PromptError,
    QueueFullError,
    RankLostError,
    ServerError,
    ShuttingDownError,
    StructuredOutputError,
    UnknownAdapterError,
    UnsupportedModelError,
)
from kvboost.results import (
    AdapterInfo,
    AnswerAudit,
    AppliedEdit,
    Arrangement,
    Calibration,
    Explanation,
    GenerationResult,
    Healing,
    HealReport,
    ParsedAnswer,
    Pin,
    ReuseReport,
    Score,
    Span,
    SpanKind,
    Timings,
    TokenLogprob,
    ToolCall,
    VerificationReport,
)

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.model.execution.embedding import EmbeddingModel
    from kvboost.model.execution.reference import StockModel
    from kvboost.model.loading.weights import ModelInfo, list_models, pull_model
    from kvboost.runtime.streams import AsyncTextStream, TextStream
    from kvboost.tokens.prompt import Conversation

__version__ = "1.0.0"

__all__ = [
    "AdapterError",
    "AdapterInfo",
    "AdapterNotFoundError",
    "AnswerAudit",
    "AppliedEdit",
    "Arrangement",
    "AsyncTextStream",
    "CacheFolderError",
    "Calibration",
    "ChecksumError",
    "ConfigError",
    "ContextLengthError",
    "Conversation",
    "EmbeddingModel",
    "EngineConfig",
    "Explanation",
    "ForgetError",
    "GenerationMode",
    "GenerationResult",
    "HealReport",
    "Healing",
    "ImageError",
    "KVBoost",
    "KVBoostError",
    "KVEvents",
    "KVTooLargeError",
    "ModelError",
    "ModelInfo",
    "ModelNotFoundError",
    "ParsedAnswer",
    "Pin",
    "PinError",
    "PromptError",
    "QueueFullError",
    "RankLostError",
    "ReuseReport",
    "Score",
    "ServerError",
    "ShuttingDownError",
    "Span",
    "SpanKind",
    "StockModel",
    "StructuredOutputError",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "UnknownAdapterError",
    "UnsupportedModelError",
    "VerificationReport",
    "list_models",
    "pull_model",
]

# Imported on first use. KVBoost and StockModel import torch and transformers, which takes seconds,
# and commands such as `kvboost --help` and `kvboost models` should not wait for them.
_LAZY = {
    "AsyncTextStream": "kvboost.runtime.streams",
    "Conversation": "kvboost.tokens.prompt",
    "EmbeddingModel": "kvboost.model.execution.embedding",
    "KVBoost": "kvboost.engine",
    "ModelInfo": "kvboost.model.loading.weights",
    "StockModel": "kvboost.model.execution.reference",
    "TextStream": "kvboost.runtime.streams",
    "list_models": "kvboost.model.loading.weights",
    "pull_model": "kvboost.model.loading.weights",
}


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet, for completion in editors."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
