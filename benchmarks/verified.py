"""Verified answers to questions over passages: are they those of a full prefill, and how long do
they take?

Each passage was read after the chat template's header. Every question is answered in mode
``baseline``, in mode ``prefix_cache`` with an empty cache (a plain prefill) and verified, greedily,
in turn, at every length. Prints how many answers are the same to the token, the medians of the
whole time of a call, the median of the ratios of verified to plain prefill, and how many tokens
speculation drafted for each; the last line is its record as JSON. ``--save`` keeps every question
at once.

    python -m benchmarks verified --dataset musique_dev.jsonl [--model …] [--answer 64]
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any

from kvboost import KVBoost, SpanKind
from kvboost.bench.quality.asked import MOST_BYTES
from kvboost.bench.texts.questions import Question, choose_questions

WAYS: dict[str, dict[str, Any]] = {
    "baseline": {"mode": "baseline"},
    "plain prefill": {"mode": "prefix_cache"},
    "verified": {"exactness": "verified"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    questions = choose_questions(options.dataset, options.limit, options.part)
    with (
        KVBoost.from_pretrained(
            options.model,
            device=options.device,
            dtype=options.dtype,
            reuse_moved="always",
            max_kv_bytes=MOST_BYTES,
            gpu_cache_bytes=MOST_BYTES,
        ) as engine,
        open(options.save, "a") if options.save else nullcontext() as kept,
    ):
        ask(engine, questions[0], options.answer[0], options)  # warms up
        rows = []
        for number, question in enumerate(questions):
            tokens = options.answer[number % len(options.answer)]
            rows.append(ask(engine, question, tokens, options, number))
            keep(rows[-1], kept)
    print(json.dumps({"model": options.model, "answers": report(rows, options.answer)}))


def ask(
    engine: KVBoost, question: Question, tokens: int, options: argparse.Namespace, number: int = 0
) -> dict[str, Any]:
    """One question in all ways, another one first for each ``number``: whole times, drafts, and
    whether answers are the same."""
    documents = [text.strip() + "\n\n" for text in question.passages[: options.passages]]
    asked = f"Question: {question.question}\nAnswer in a few words."
    prompt = engine.arrange(None, documents, asked, cache_salt="none").prompt
    answers = {}
    moved_tokens = 0
    ways = list(WAYS)
    for turn in range(len(ways)):
        way = ways[(number + turn) % len(ways)]
        if way == "verified":
            for text in documents:
                engine.warm(text, cache_salt=way)
            moved_tokens = engine.plan(prompt, cache_salt=way).count(SpanKind.MOVED)
        answers[way] = engine.generate(
            prompt, tokens, cache_salt=way, ignore_eos=options.ignore_eos, **WAYS[way]
        )
        engine.forget_salt(way)
    verified, plain = answers["verified"], answers["plain prefill"]
    return {
        "question": question.question,
        "answer_tokens": tokens,
        "prompt_tokens": verified.prompt_tokens,
        "moved_tokens": moved_tokens,
        "drafted_tokens": verified.drafted_tokens,
        "accepted_tokens": verified.accepted_tokens,
        "plain_drafted_tokens": plain.drafted_tokens,
        "same": verified.token_ids == answers["baseline"].token_ids,
        "plain_same": plain.token_ids == answers["baseline"].token_ids,
        "milliseconds": {way: answers[way].total_ms for way in WAYS},
    }


def keep(row: dict[str, Any], file: IO[str] | None) -> None:
    if file is not None:
        file.write(json.dumps(row) + "\n")
        file.flush()


def report(rows: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for tokens in lengths:
        some = [row for row in rows if row["answer_tokens"] == tokens]
        if not some:
            continue
        times = {way: [row["milliseconds"][way] for row in some] for way in WAYS}
        pairs = zip(times["verified"], times["plain prefill"], strict=True)
        counts = ("moved_tokens", "drafted_tokens", "accepted_tokens", "plain_drafted_tokens")
        found.append(
            {
                "answer_tokens": tokens,
                "questions": len(some),
                **{name: statistics.mean(row[name] for row in some) for name in counts},
                "same_as_baseline": sum(row["same"] for row in some),
                "plain_prefill_same_as_baseline": sum(row["plain_same"] for row in some),
                "median_ms": {way: statistics.median(column) for way, column in times.items()},
                "verified_to_plain": statistics.median(mine / plain for mine, plain in pairs),
            }
        )
        one = found[-1]
        print(
            f"{tokens} tokens, {len(some)} questions: {one['same_as_baseline']} verified answers "
            f"equal baseline's; verified ÷ plain prefill, median: {one['verified_to_plain']:.2f}; "
            f"tokens drafted by speculation, mean: {one['drafted_tokens']:.0f} verified "
            f"({one['accepted_tokens']:.0f} accepted), {one['plain_drafted_tokens']:.0f} plain"
        )
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--dataset", type=Path, action="append", default=[])
    parser.add_argument("--limit", type=int, help="questions of every file")
    parser.add_argument("--part", default="1/1", help="2/3: every third, from the second")
    parser.add_argument("--passages", type=int, default=8)
    parser.add_argument("--answer", type=int, nargs="+", default=[64, 256], help="tokens, in turn")
    parser.add_argument("--ignore-eos", action="store_true", help="answers of full length")
    parser.add_argument("--save", help="keep every question, as JSON lines")
    return parser
