"""The result of a request: text, tokens, times, and the source of every prompt row."""

from kvboost.results.answer import (
    AppliedEdit,
    GenerationResult,
    ParsedAnswer,
    TokenLogprob,
    ToolCall,
)
from kvboost.results.explanation import Divergence, Explanation, Part, Why
from kvboost.results.healing import AnswerAudit, Healing, HealReport
from kvboost.results.reports import (
    LONGEST_ADAPTER_NAME,
    AdapterInfo,
    Arrangement,
    Calibration,
    CalibrationStep,
    Pin,
    Score,
    VerificationReport,
    kl_divergence,
)
from kvboost.results.reuse import MovedRows, PlanFacts, ReuseReport
from kvboost.results.spans import Span, SpanKind
from kvboost.results.timings import PHASES, Clock, Timings

__all__ = [
    "LONGEST_ADAPTER_NAME",
    "PHASES",
    "AdapterInfo",
    "AnswerAudit",
    "AppliedEdit",
    "Arrangement",
    "Calibration",
    "CalibrationStep",
    "Clock",
    "Divergence",
    "Explanation",
    "GenerationResult",
    "HealReport",
    "Healing",
    "MovedRows",
    "ParsedAnswer",
    "Part",
    "Pin",
    "PlanFacts",
    "ReuseReport",
    "Score",
    "Span",
    "SpanKind",
    "Timings",
    "TokenLogprob",
    "ToolCall",
    "VerificationReport",
    "Why",
    "kl_divergence",
]
