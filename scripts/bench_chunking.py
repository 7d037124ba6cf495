"""Does it matter where chunks are cut, now that text is found at any offset?

    python scripts/bench_chunking.py [dataset.jsonl] [questions]

Passages are read in one request and asked about in another order behind a longer header, with
each chunking strategy and two chunk sizes. Prints how much of the prompt was reused, in how many
chunks, what planning took and how far the answer deviates; JSON on the last line.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvboost import GenerationMode, KVBoost
from kvboost.bench.questions import Question, make_questions, read_questions
from kvboost.results import kl_divergence

ANSWER_TOKENS = 8


def main(dataset: str | None = None, count: str = "6") -> None:
    questions = (read_questions(dataset) if dataset else make_questions(int(count)))[: int(count)]
    table = Table(title="passages read in one order, asked in another behind a longer header")
    headings = ("chunking", "chunk size", "reused", "chunks used", "chunks kept", "plan, ms", "KL")
    for heading in headings:
        table.add_column(heading, justify="right")
    rows = []
    for chunking in ("fixed", "semantic", "document"):
        for size in (64, 128):
            row = measure(questions, chunking, size)
            rows.append(row)
            table.add_row(
                *(
                    f"{value:.3g}" if isinstance(value, float) else str(value)
                    for value in row.values()
                )
            )
    Console().print(table)
    print(json.dumps({"benchmark": "chunking", "questions": len(questions), "rows": rows}))


def measure(questions: Sequence[Question], chunking: str, size: int) -> dict[str, object]:
    reused, used, plans, divergences = [], [], [], []
    with KVBoost.from_pretrained(
        chunking=chunking, chunk_size=size, reuse_moved="always"
    ) as engine:
        for number, question in enumerate(questions):
            passages = [f"{text.strip()}\n\n" for text in question.passages[:6]]
            first = "Read these passages.\n\n" + "".join(passages)
            engine.generate([{"role": "user", "content": first}], 1, GenerationMode.PREFIX_CACHE)
            random.Random(number).shuffle(passages)
            second = "Read these passages and then answer the question behind them.\n\n"
            prompt = [
                {"role": "user", "content": f"{second}{''.join(passages)}{question.question}"}
            ]
            answer = engine.generate(prompt, ANSWER_TOKENS, GenerationMode.BASELINE).token_ids
            full = engine.score(prompt, answer, GenerationMode.BASELINE)
            moved = engine.score(prompt, answer)
            reused.append(
                1
                - sum(span.num_tokens for span in moved.reuse.spans if span.kind.value == "compute")
                / moved.reuse.prompt_tokens
            )
            used.append(sum(span.donor is not None for span in moved.reuse.spans))
            plans.append(moved.timings.plan_ms)
            divergences.append(float(kl_divergence(full.logits, moved.logits).mean()))
        kept = engine.cache_stats()["hot_chunks"]
    return {
        "chunking": chunking,
        "size": size,
        "reused": statistics.mean(reused),
        "used": statistics.mean(used),
        "kept": kept,
        "plan_ms": statistics.median(plans),
        "mean_kl": statistics.mean(divergences),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
