"""Calibration: how much repair the user's own prompts need."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.checks.engine import Engine
from kvboost.config import (
    WITHOUT_RATIO,
    GenerationMode,
    RepairParams,
    at_least,
)
from kvboost.errors import ConfigError, PromptError
from kvboost.progress import Progress
from kvboost.results import (
    Calibration,
    CalibrationStep,
    Score,
    SpanKind,
    kl_divergence,
)
from kvboost.tokens.prompt import Prompt

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
ANSWER_TOKENS = 16


def calibrate(
    engine: Engine, samples: Sequence[Prompt], max_kl: float, repair: RepairParams, salt: str = ""
) -> Calibration:
    """Tries larger and larger ratios until the mean KL of the samples' answers is within
    ``max_kl``."""
    if repair.strategy in WITHOUT_RATIO:
        raise ConfigError(
            f"recompute_strategy={repair.strategy!r} has no ratio to calibrate; use 'auto', "
            "'query' or 'cacheblend'"
        )
    at_least(max_kl, 0.0, "max_kl")
    if isinstance(samples, str) or not samples:
        raise PromptError("calibrate() takes several sample prompts, as they will be sent")

    def score(sample: Prompt, answer: Sequence[int], mode: GenerationMode, ratio: float) -> Score:
        return engine.score(
            sample,
            answer,
            mode,
            cache_salt=salt,
            recompute_ratio=ratio,
            reuse_moved="always",
        )

    steps: list[CalibrationStep] = []
    with Progress("calibrating", only_on_terminal=True) as progress:
        answers, expected = [], []
        with progress.step("answering in full", len(samples)) as step:
            for sample in samples:
                answer = engine.generate(
                    sample, ANSWER_TOKENS, GenerationMode.BASELINE, keep=False
                ).token_ids
                answers.append(answer)
                full = score(sample, answer, GenerationMode.BASELINE, 0.0)
                expected.append(full.logits)
                step.advance()
        for ratio in RATIOS:
            with progress.step(f"recomputing {ratio:.0%}", len(samples)) as step:
                divergences, moved, charged = [], 0, 0.0
                for sample, answer, logits in zip(samples, answers, expected, strict=True):
                    scored = score(sample, answer, GenerationMode.CHUNK_KV_REUSE, ratio)
                    divergences.append(float(kl_divergence(logits, scored.logits).mean()))
                    moved += scored.reuse.count(SpanKind.MOVED)
                    charged += scored.reuse.charged_tokens
                    step.advance()
            if not moved:
                raise PromptError(
                    "none of the samples reuses moved text: warm() their documents first, or send "
                    "requests that hold them elsewhere"
                )
            mean = sum(divergences) / len(divergences)
            steps.append(CalibrationStep(ratio, mean, charged / moved))
            if mean <= max_kl:
                break
    return Calibration(steps[-1].ratio, max_kl, tuple(steps))
