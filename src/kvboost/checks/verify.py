"""Does reuse change the answer? Checks an engine on built-in prompts."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress

import torch

from kvboost.checks.engine import Engine
from kvboost.config import GenerationMode
from kvboost.errors import ForgetError
from kvboost.results import VerificationReport, kl_divergence

PASSAGE = """\
The lighthouse at Corran Point was built in 1874 after three ships were lost in one winter. Its
keeper, Ishbel Grant, wrote down the weather every six hours for thirty-one years, and her books
are still read by people who study the climate of the western coast. The lamp burned paraffin
until 1936, when a cable was laid from the mainland and an electric lamp of two hundred watts took
its place. Fishermen complained that the new light was too white. A plain blue door leads to the
stairs, of which there are one hundred and forty-two, and every twentieth step has a small brass
plate with the name of one of the masons. In 1968 the last keeper left, and a clock has turned the
lamp on and off ever since. Visitors may climb the tower on the first Sunday of each month, if the
wind stays below forty miles an hour; the key hangs in the harbour office, beside the tide tables.
"""

QUESTIONS = (
    "Question: When was the lighthouse built?\nAnswer:",
    "Question: Who wrote down the weather, and for how long?\nAnswer:",
    "Question: What did the fishermen say about the electric lamp?\nAnswer:",
)


def verify(engine: Engine, max_new_tokens: int) -> VerificationReport:
    """Reads a passage once, then asks three questions about it with and without reuse, under a
    salt of its own. In 16-bit arithmetic, rounding differs between batches, so only distributions
    are compared. In 32-bit arithmetic the tokens must be equal too."""
    salt = f"verify-{uuid.uuid4()}"
    prompts = _prompts(engine, max_new_tokens)
    reused = total = 0
    deltas, divergences, largest = [], [], []
    tokens_equal = True
    try:
        engine.generate(
            prompts[0][0], 1, GenerationMode.PREFIX_CACHE, cache_salt=salt, ignore_eos=True
        )
        for _, prompt in prompts:
            base = engine.generate(
                prompt, max_new_tokens, GenerationMode.BASELINE, cache_salt=salt, ignore_eos=True
            )
            hit = engine.generate(
                prompt,
                max_new_tokens,
                GenerationMode.PREFIX_CACHE,
                cache_salt=salt,
                ignore_eos=True,
            )
            reused += hit.cached_tokens
            total += hit.prompt_tokens
            tokens_equal &= hit.token_ids == base.token_ids
            modes = (GenerationMode.BASELINE, GenerationMode.PREFIX_CACHE)
            expected, actual = (
                engine.score(prompt, base.token_ids, mode, cache_salt=salt).logits.double()
                for mode in modes
            )
            deltas.append(float((expected - actual).abs().max()))
            largest.append(float(expected.abs().max()))
            divergences.append(float(kl_divergence(expected, actual).mean()))
    finally:
        with suppress(ForgetError):  # what is left of a salt that was made up here harms nobody
            engine.forget_salt(salt)
    return _judge(
        engine.dtype,
        prompts=len(prompts),
        reused_share=reused / total,
        max_logit_delta=_worst(deltas),
        largest_logit=max(largest),
        mean_kl=_worst([sum(divergences) / len(divergences)]),
        tokens_equal=tokens_equal,
    )


def _judge(
    dtype: torch.dtype,
    *,
    prompts: int,
    reused_share: float,
    max_logit_delta: float,
    largest_logit: float,
    mean_kl: float,
    tokens_equal: bool,
) -> VerificationReport:
    full_precision = dtype == torch.float32
    tolerance_logit = 1e-3 if full_precision else 0.1 * largest_logit
    tolerance_kl = 1e-6 if full_precision else 0.02
    problems = []
    if reused_share <= 0.5:
        problems.append(f"only {reused_share:.0%} of the prompt tokens came from the cache")
    if not max_logit_delta <= tolerance_logit:
        problems.append(f"logits differ by {max_logit_delta:.3g}, allowed {tolerance_logit:.3g}")
    if not mean_kl <= tolerance_kl:
        problems.append(f"mean KL is {mean_kl:.3g}, allowed {tolerance_kl:.3g}")
    if full_precision and not tokens_equal:
        problems.append("greedy tokens differ")
    return VerificationReport(
        prompts=prompts,
        reused_share=reused_share,
        max_logit_delta=max_logit_delta,
        mean_kl=mean_kl,
        tokens_equal=tokens_equal,
        tolerance_logit=tolerance_logit,
        tolerance_kl=tolerance_kl,
        problems=tuple(problems),
    )


def _prompts(engine: Engine, max_new_tokens: int) -> list[tuple[list[int], list[int]]]:
    """(passage, passage and question) for each question, cut to fit the model's context."""
    room = engine.context_length
    prompts = []
    for question in QUESTIONS:
        passage, tail = engine.encode(PASSAGE), engine.encode(question)[-24:]
        if room is not None:
            passage = passage[: max(1, room - max_new_tokens - len(tail) - 1)]
        prompts.append((passage, passage + tail))
    return prompts


def _worst(values: Sequence[float]) -> float:
    """The largest value; NaN counts as the worst."""
    return max(values, key=lambda value: float("inf") if value != value else value)
