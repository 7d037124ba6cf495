"""Which function has the bug: answers without reuse, from a prefix cache, and from moved chunks.

The files of a pool were read in earlier requests, a few together. Every question then shows some
of them in a new order, one with a bug in it, and the model says how likely each of four functions
is to be the one: the likelihood of its name behind the prompt. Requests keep nothing, so a
question's outcome does not depend on those before it, and a run can be split, broken off and gone
on with.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvboost import GenerationMode, KVBoost
from kvboost.bench.bug_questions import CHANCE, HINTS, POOL, BugQuestion, make_bugs, pool
from kvboost.bench.machine import describe
from kvboost.bench.plots import check_plot
from kvboost.bench.record import record
from kvboost.bench.stats import paired_bootstrap, wilson
from kvboost.bench.study_plots import plot_bugs
from kvboost.bench.study_report import bug_table
from kvboost.bench.timing import Sample
from kvboost.bench.workloads import fragments
from kvboost.config import one_of
from kvboost.errors import ConfigError
from kvboost.progress import Progress

MODES = tuple(mode.value for mode in GenerationMode)
BASELINE = GenerationMode.BASELINE.value
SALT = "buglocal"
LEAD = "The line is in the function"
POINTS = 1.0
"""Reuse may change accuracy by so many points."""
LEAST_QUESTIONS = 200
"""With fewer, nothing is called met or not."""


@dataclass(frozen=True)
class Task:
    """What is asked, of whom."""

    questions: int = 240
    files: int = 5
    hint: str = "line"
    seed: int = 0
    size: int = POOL

    def __post_init__(self) -> None:
        one_of(self.hint, list(HINTS), "hint")

    def make(self) -> list[BugQuestion]:
        return make_bugs(
            self.questions, files=self.files, hint=self.hint, seed=self.seed, size=self.size
        )


@dataclass(frozen=True)
class BugAnswer:
    """What one mode made of a question."""

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


def read_pool(engine: KVBoost, task: Task) -> None:
    """The earlier requests: every file of the pool once, as many together as a question shows."""
    texts = [excerpt.text() for excerpt in pool(task.size)]
    for start in range(0, len(texts), task.files):
        some = texts[start : start + task.files]
        ids = engine.arrange(None, some, "Summarize this.", cache_salt="none").prompt
        engine.warm(ids, cache_salt=SALT)


def measure_bugs(
    engine: KVBoost,
    task: Task,
    questions: Sequence[BugQuestion],
    run: str,
    on_answer: Callable[[], None] = lambda: None,
) -> Iterator[BugRow]:
    """Answers each question in each mode; every second one in the opposite order. The first is
    answered once before, uncounted."""
    read_pool(engine, task)
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
    """Of the whole name and what ends it. All four stand in the files, so that what follows a
    name's first tokens is all but certain: long names are not unlikely for being long."""
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


def judge(reused: BugSummary) -> dict[str, Any]:
    """Whether reuse leaves accuracy where it was, and what was seen."""
    points = 100 * reused.difference
    low, high = (100 * value for value in reused.difference_interval)
    enough = reused.count >= LEAST_QUESTIONS
    return {
        "text": f"accuracy with chunk reuse within {POINTS:g} point of the baseline's",
        "met": abs(points) <= POINTS if enough else None,
        "figure": f"{points:+.1f} points [{low:+.1f}…{high:+.1f}], {reused.count} questions"
        + ("" if enough else f"; {LEAST_QUESTIONS} are needed"),
    }


def load_rows(path: str | os.PathLike[str]) -> list[BugRow]:
    """Rows an earlier run has written; none if there is no such file. A last line that was cut off
    while it was written does not count."""
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


def run_buglocal(
    model: str,
    task: Task,
    console: Console,
    *,
    rows_file: str | None = None,
    part: str = "1/1",
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Answers what ``rows_file`` does not have yet, and sums up all of this run's questions."""
    if plot is not None:
        check_plot(plot)
    if rows_file is not None and not Path(rows_file).absolute().parent.is_dir():
        folder = Path(rows_file).absolute().parent
        raise ConfigError(f"rows={rows_file!r}: there is no folder {str(folder)!r}; create it")
    number, _, total = part.partition("/")
    if not (number.isdigit() and total.isdigit() and 1 <= int(number) <= int(total)):
        raise ConfigError(f"part={part!r} must be such as '2/3', the second of three")
    questions = task.make()[int(number) - 1 :: int(total)]
    if not questions:
        raise ConfigError(f"part={part!r}: there are only {task.questions} questions")
    saved = load_rows(rows_file) if rows_file is not None else []
    with KVBoost.from_pretrained(model, device=device, dtype=dtype, reuse_moved="always") as engine:
        machine = describe(engine.device, engine.dtype)
        console.print(machine)
        run = f"{model} {machine['dtype']} {machine.get('gpu', machine['cpu'])}"
        keys = {question.key for question in questions}
        known = {row.key: row for row in saved if row.run == run and row.key in keys}
        if saved:
            console.print(
                f"{len(known)} questions are answered in {rows_file} already; "
                f"{len(saved) - len(known)} rows there are of other parts, settings or machines",
                highlight=False,
            )
        missing = [question for question in questions if question.key not in known]
        if missing:
            for row in _answered(engine, task, missing, run, rows_file):
                known[row.key] = row
    rows = [known[question.key] for question in questions]
    summaries = summarize(rows)
    console.print(bug_table(summaries, CHANCE))
    goal = judge(summaries[-1])
    state = {True: "met", False: "not met", None: "cannot be said"}[goal["met"]]
    console.print(f"goal, {goal['text']}: {state} ({goal['figure']})", highlight=False)
    if plot is not None:
        plot_bugs(summaries, plot, title=f"{model}: which function has the bug", chance=CHANCE)
        console.print(f"drawn in {plot}", highlight=False)
    return record(
        "buglocal",
        model,
        machine,
        task=asdict(task),
        part=part,
        chance=CHANCE,
        prompt_tokens=statistics.median(row.prompt_tokens for row in rows),
        summaries=[one.as_json() for one in summaries],
        goals=[goal],
    )


def _answered(
    engine: KVBoost,
    task: Task,
    questions: Sequence[BugQuestion],
    run: str,
    rows_file: str | None,
) -> Iterator[BugRow]:
    """Measures, and writes every row as soon as it is there."""
    with (
        Progress(f"{len(questions)} questions, three modes") as progress,
        progress.step("answered", len(questions) * len(MODES)) as step,
    ):
        for row in measure_bugs(engine, task, questions, run, step.advance):
            if rows_file is not None:
                with open(rows_file, "a") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
            yield row
