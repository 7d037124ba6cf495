"""Which function has the bug: answers without reuse, from exact hits, and from moved text.

The files of a pool were read in earlier requests, a few together. Every question then shows some
of them in a new order, one with a bug in it, and the model says how likely each of four functions
is to have it: the likelihood of its name after the prompt. Requests keep nothing, so a question's
outcome does not depend on earlier ones, and a run can be split, interrupted and continued.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from bug_questions import CHANCE, HINTS, POOL, BugQuestion, make_bugs, pool
from rich.table import Table

from kvboost import GenerationMode, KVBoost
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, check_folder, option
from kvboost.bench.kit.goals import Goal
from kvboost.bench.kit.stats import paired_bootstrap
from kvboost.bench.kit.tables import spread, table
from kvboost.bench.kit.timing import Sample
from kvboost.bench.texts.prompts import fragments
from kvboost.bench.texts.questions import part_of
from kvboost.config import DEFAULT_MODEL
from kvboost.errors import ConfigError
from kvboost.progress import Progress

MODES = tuple(mode.value for mode in GenerationMode)
BASELINE = GenerationMode.BASELINE.value
SALT = "bug-location"
LEAD = "The line is in the function"
GOAL = "accuracy with chunk reuse within 1 point of the baseline's"
POINTS = 1.0
"""Reuse may change accuracy by this many points."""
LEAST_QUESTIONS = 200
"""With fewer, the goal is not judged."""


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"model": DEFAULT_MODEL, "questions": 1, "files": 2, "pool": 4}

    model: str = option(
        "qwen2.5-coder-1.5b",
        "A model that reads code; scripts/fetch_models.py fetches the usual one.",
    )
    questions: int = option(240, "How many; 200 are needed to judge the goal.", least=1)
    files: int = option(5, "Files in a prompt.", least=2)
    hint: str = option("line", "What a question tells of the bug.", choices=tuple(HINTS))
    seed: int = option(0, "Decides bugs, files and candidates.")
    pool: int = option(POOL, "Files that were read before.", least=2)
    rows: str | None = option(
        None, "Keep answers here as JSON lines; those there are not asked again."
    )
    part: str = option("1/1", "2/3: every third question, from the second.")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folder(self.rows, "rows")

    def make(self) -> list[BugQuestion]:
        """The questions of this part."""
        made = make_bugs(
            self.questions, files=self.files, hint=self.hint, seed=self.seed, size=self.pool
        )
        return part_of(made, self.part)

    def tokens_read(self) -> float:
        return 420 * (self.files * 8 * self.questions + self.pool)


@dataclass(frozen=True)
class BugAnswer:
    """A question's answer in one mode."""

    chosen: int
    logprobs: list[float]
    """Of each candidate's name."""
    ttft_ms: float
    """By an outside clock: one token, the whole call."""
    not_computed: float


@dataclass(frozen=True)
class BugRow:
    """One question in every mode. ``run`` names model, dtype and device."""

    run: str
    key: str
    module: str
    function: str
    kind: str
    prompt_tokens: int
    right: int
    answers: dict[str, BugAnswer]

    @classmethod
    def from_json(cls, line: str) -> BugRow:
        row = json.loads(line)
        row["answers"] = {mode: BugAnswer(**one) for mode, one in row["answers"].items()}
        return cls(**row)


@dataclass(frozen=True)
class BugSummary:
    """A mode over all questions, with 95 % intervals. Differences are paired, to the baseline."""

    mode: str
    count: int
    accuracy: float
    interval: tuple[float, float]
    difference: float
    difference_interval: tuple[float, float]
    same_answer: float
    not_computed: float
    ttft: Sample

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval
        share = {"value": self.accuracy, "low": low, "high": high}
        return {**asdict(self), "accuracy": share}


def read_pool(engine: KVBoost, settings: Settings) -> None:
    """The earlier requests: every file of the pool once, as many together as a question shows."""
    texts = [excerpt.text() for excerpt in pool(settings.pool)]
    for start in range(0, len(texts), settings.files):
        some = texts[start : start + settings.files]
        ids = engine.arrange(None, some, "Summarize this.", cache_salt="none").prompt
        engine.warm(ids, cache_salt=SALT)


def measure_bugs(
    engine: KVBoost,
    settings: Settings,
    questions: Sequence[BugQuestion],
    run: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Iterator[BugRow]:
    """Answers each question in each mode; every second question in the opposite order. The first
    is answered once before, which does not count."""
    read_pool(engine, settings)
    encode = fragments(engine.encode)
    for at, question in enumerate(questions):
        framed = engine.arrange(None, question.files, question.question, cache_salt="none")
        prompt = framed.prompt + encode(LEAD)
        names = [encode(f" `{name}`") for name in question.candidates]
        if not at:
            for mode in MODES:
                engine.generate(prompt, 1, mode, cache_salt=SALT, keep=False)
        answers = {}
        for mode in MODES if at % 2 else reversed(MODES):
            answers[mode] = _answer(engine, prompt, names, mode)
            on_answer()
        yield BugRow(
            run,
            question.key,
            question.module,
            question.function,
            question.mutation.kind,
            len(prompt),
            question.answer,
            {mode: answers[mode] for mode in MODES},
        )


def _answer(engine: KVBoost, prompt: list[int], names: list[list[int]], mode: str) -> BugAnswer:
    start = time.perf_counter()
    result = engine.generate(prompt, 1, mode, cache_salt=SALT, keep=False)
    ttft_ms = (time.perf_counter() - start) * 1e3
    logprobs = [_logprob(engine, prompt, name, mode) for name in names]
    chosen = max(range(len(names)), key=logprobs.__getitem__)
    return BugAnswer(chosen, logprobs, ttft_ms, result.kv_reuse_ratio)


def _logprob(engine: KVBoost, prompt: list[int], name: list[int], mode: str) -> float:
    """Of the whole name and what ends it. All four names are in the files, so what follows a
    name's first tokens is all but certain: a long name is not unlikely because it is long."""
    logits = engine.score(prompt, name, mode, cache_salt=SALT).logits
    ids = torch.tensor(name, device=logits.device)
    return float(logits.float().log_softmax(-1).gather(-1, ids[:, None]).sum())


def summarize(rows: Sequence[BugRow]) -> list[BugSummary]:
    """The baseline first."""
    right = {mode: [float(row.answers[mode].chosen == row.right) for row in rows] for mode in MODES}
    found = []
    for mode in MODES:
        own = [row.answers[mode] for row in rows]
        pairs = list(zip(right[mode], right[BASELINE], strict=True))
        differences = [ours - theirs for ours, theirs in pairs]
        same = [row.answers[mode].chosen == row.answers[BASELINE].chosen for row in rows]
        found.append(
            BugSummary(
                mode,
                len(rows),
                statistics.mean(right[mode]),
                wilson(int(sum(right[mode])), len(rows)),
                statistics.mean(differences),
                paired_bootstrap(differences),
                statistics.mean(same),
                statistics.mean(one.not_computed for one in own),
                Sample.of([one.ttft_ms for one in own]),
            )
        )
    return found


def judge(reused: BugSummary) -> Goal:
    """Whether reuse leaves accuracy where it was."""
    points = 100 * reused.difference
    low, high = (100 * value for value in reused.difference_interval)
    enough = reused.count >= LEAST_QUESTIONS
    figure = f"{points:+.1f} points [{low:+.1f}…{high:+.1f}], {reused.count} questions"
    if not enough:
        figure += f"; {LEAST_QUESTIONS} are needed"
    return Goal(GOAL, abs(points) <= POINTS if enough else None, figure)


def load_rows(path: str | os.PathLike[str]) -> list[BugRow]:
    """Rows of an earlier run; none if there is no such file. A last line that was cut off while it
    was written does not count."""
    try:
        lines = Path(path).read_text().splitlines(keepends=True)
        return [BugRow.from_json(line) for line in lines if line.endswith("\n")]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"rows={os.fspath(path)!r} holds no rows that this benchmark wrote ({error!r}); give "
            "another file"
        ) from error


def run(settings: Settings, bench: Bench) -> Report:
    """Answers the questions that the file of rows lacks, and sums up all of them."""
    questions = settings.make()
    saved = load_rows(settings.rows) if settings.rows is not None else []
    with bench.load_engine(reuse_moved="always") as engine:
        machine = bench.machine
        name = f"{settings.model} {machine['dtype']} {machine.get('gpu', machine['cpu'])}"
        keys = {question.key for question in questions}
        known = {row.key: row for row in saved if row.run == name and row.key in keys}
        if saved:
            bench.say(
                f"{len(known)} questions are answered in {settings.rows} already; "
                f"{len(saved) - len(known)} rows there are of other parts, settings or machines"
            )
        missing = [question for question in questions if question.key not in known]
        with (
            Progress(f"{len(missing)} questions, three modes") as progress,
            progress.step("answered", len(missing) * len(MODES)) as step,
        ):
            for row in (
                measure_bugs(engine, settings, missing, name, step.advance) if missing else ()
            ):
                known[row.key] = row
                if settings.rows is not None:
                    with open(settings.rows, "a") as file:
                        file.write(json.dumps(asdict(row)) + "\n")
    rows = [known[question.key] for question in questions]
    summaries = summarize(rows)
    return Report(
        {
            "chance": CHANCE,
            "prompt_tokens": statistics.median(row.prompt_tokens for row in rows),
            "summaries": [one.as_json() for one in summaries],
        },
        [bug_table(summaries)],
        [judge(summaries[-1])],
    )


def bug_table(summaries: Sequence[BugSummary]) -> Table:
    full = summaries[0].ttft.median_ms

    def points(one: BugSummary) -> str:
        values = [100 * value for value in (one.difference, *one.difference_interval)]
        return "–" if one is summaries[0] else "{:+.1f} [{:+.1f}…{:+.1f}]".format(*values)

    return table(
        f"{summaries[0].count} questions, chance {CHANCE:.0%}; 95 % intervals in brackets",
        ("",),
        ("right", "points off", "same", "reused", "TTFT, ms", "÷"),
        [
            (
                one.mode.removesuffix("_cache").removesuffix("_kv_reuse"),
                f"{one.accuracy:.1%} [{one.interval[0]:.0%}-{one.interval[1]:.0%}]",
                *(points(one), f"{one.same_answer:.0%}", f"{one.not_computed:.0%}"),
                *(spread(one.ttft), f"{one.ttft.median_ms / full:.2f}"),
            )
            for one in summaries
        ],
    )


def wilson(successes: int, trials: int, *, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % unless ``z`` says otherwise. Unlike the usual interval it
    stays within 0 and 1, and is not empty if all or none succeeded."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"{successes} of {trials} is no share; give at least one trial")
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
