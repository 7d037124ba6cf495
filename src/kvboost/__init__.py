"""KVBoost: a language model should never read the same text twice."""

from importlib import import_module
from typing import TYPE_CHECKING

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import (
    CacheFolderError,
    ChecksumError,
    ConfigError,
    ContextLengthError,
    ForgetError,
    KVBoostError,
    KVTooLargeError,
    ModelError,
    ModelNotFoundError,
    PromptError,
    QueueFullError,
    ShuttingDownError,
    UnsupportedModelError,
)
from kvboost.results import (
    Arrangement,
    Calibration,
    GenerationResult,
    ReuseReport,
    Score,
    Span,
    SpanKind,
    Timings,
    TokenLogprob,
    VerificationReport,
)
from kvboost.runtime.streams import AsyncTextStream, TextStream

if TYPE_CHECKING:
    from kvboost.engine import KVBoost
    from kvboost.model.reference import StockModel
    from kvboost.model.weights import ModelInfo, list_models, pull_model

__version__ = "1.0.0.dev0"

__all__ = [
    "Arrangement",
    "AsyncTextStream",
    "CacheFolderError",
    "Calibration",
    "ChecksumError",
    "ConfigError",
    "ContextLengthError",
    "EngineConfig",
    "ForgetError",
    "GenerationMode",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "KVTooLargeError",
    "ModelError",
    "ModelInfo",
    "ModelNotFoundError",
    "PromptError",
    "QueueFullError",
    "ReuseReport",
    "Score",
    "ShuttingDownError",
    "Span",
    "SpanKind",
    "StockModel",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "UnsupportedModelError",
    "VerificationReport",
    "list_models",
    "pull_model",
]

# These import torch and transformers, which takes seconds; `kvboost --help` should not.
_HEAVY = {
    "KVBoost": "kvboost.engine",
    "ModelInfo": "kvboost.model.weights",
    "StockModel": "kvboost.model.reference",
    "list_models": "kvboost.model.weights",
    "pull_model": "kvboost.model.weights",
}


def __getattr__(name: str) -> object:
    if name not in _HEAVY:
        raise AttributeError(f"module 'kvboost' has no attribute {name!r}")
    return getattr(import_module(_HEAVY[name]), name)
