"""KVBoost: a language model should never read the same text twice."""

from kvboost.config import GenerationMode
from kvboost.engine import KVBoost
from kvboost.errors import (
    CacheFolderError,
    ChecksumError,
    ConfigError,
    ContextLengthError,
    KVBoostError,
    ModelError,
    ModelNotFoundError,
    PromptError,
    UnsupportedModelError,
)
from kvboost.model.reference import StockModel
from kvboost.results import (
    GenerationResult,
    ReuseReport,
    Span,
    SpanKind,
    Timings,
    TokenLogprob,
    VerificationReport,
)
from kvboost.stream import TextStream

__version__ = "1.0.0.dev0"

__all__ = [
    "CacheFolderError",
    "ChecksumError",
    "ConfigError",
    "ContextLengthError",
    "GenerationMode",
    "GenerationResult",
    "KVBoost",
    "KVBoostError",
    "ModelError",
    "ModelNotFoundError",
    "PromptError",
    "ReuseReport",
    "Span",
    "SpanKind",
    "StockModel",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "UnsupportedModelError",
    "VerificationReport",
]
