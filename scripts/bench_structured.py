"""How long a JSON answer takes, relative to free text of the same length.

Each round asks for both, one after the other, on one engine; the prompt is cached. Prints the
median of the rounds' ratios: of the time to the last token, and of the processor's time, which
other programs on the machine disturb less. Also prints the forwards of each, and the time of a
mask. The last line is JSON.

    python scripts/bench_structured.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

from kvboost import GenerationResult, KVBoost

GOAL = 0.8
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "author": {"type": "string", "maxLength": 30},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "in_print": {"type": "boolean"},
        "genre": {"enum": ["novel", "poem", "essay", "play"]},
        "publisher": {"type": "string", "maxLength": 20},
    },
    "required": ["title", "author", "year", "in_print", "genre", "publisher"],
    "additionalProperties": False,
}
MESSAGES = [
    {
        "role": "user",
        "content": "Describe a famous book as JSON with title, author, year, in_print, genre and "
        "publisher.",
    }
]


class Counted:
    """Counts the forwards of an engine."""

    def __init__(self, engine: KVBoost) -> None:
        self._forward: Any = engine._runtime.backend.forward
        self._run = self._forward.run
        self.forwards = 0

    def __enter__(self) -> Counted:
        def counted(segments: Any) -> Any:
            self.forwards += 1
            return self._run(segments)

        self._forward.run = counted
        return self

    def __exit__(self, *_: object) -> None:
        del self._forward.run


@dataclass(frozen=True)
class Asked:
    answer: GenerationResult
    forwards: int
    cpu_seconds: float

    @property
    def seconds(self) -> float:
        return self.answer.total_ms / 1e3


def ask(engine: KVBoost, tokens: int, **options: Any) -> Asked:
    started = time.process_time()
    with Counted(engine) as counted:
        answer = engine.chat(MESSAGES, tokens, **options)
    return Asked(answer, counted.forwards, time.process_time() - started)


def mask_seconds(engine: KVBoost, answer: GenerationResult) -> float:
    """What a mask takes on average, over the tokens of ``answer``."""
    grammar = engine.compile_format({"schema": SCHEMA})
    assert grammar is not None
    constraint, seconds = grammar.start(forces=False), 0.0
    for token in answer.token_ids:
        started = time.perf_counter()
        constraint.allowed()
        seconds += time.perf_counter() - started
        constraint.accept(token)
    return seconds / len(answer.token_ids)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    with KVBoost.from_pretrained(options.model, speculate="off") as engine:
        ask(engine, 200, schema=SCHEMA)  # compiles the grammar and fills the cache
        rounds = []
        for number in range(options.rounds):
            made = ask(engine, 200, schema=SCHEMA)
            free = ask(engine, len(made.answer.token_ids), ignore_eos=True)
            rounds.append((made, free))
            print(
                f"round {number + 1}: {len(made.answer.token_ids)} tokens, JSON in "
                f"{made.seconds:.2f} s and {made.forwards} forwards, free text in "
                f"{free.seconds:.2f} s and {free.forwards}"
            )
        mask = mask_seconds(engine, made.answer)
    ratio = statistics.median(made.seconds / free.seconds for made, free in rounds)
    cpu = statistics.median(made.cpu_seconds / free.cpu_seconds for made, free in rounds)
    print(
        f"JSON takes {ratio:.2f} of the time of free text (goal: at most {GOAL}), and {cpu:.2f} of "
        "the processor's time"
    )
    report = {
        "ratio": round(ratio, 3),
        "cpu_ratio": round(cpu, 3),
        "tokens": len(made.answer.token_ids),
        "forwards": made.forwards,
        "free_forwards": free.forwards,
        "mask_us": round(mask * 1e6, 1),
        "goal_met": ratio <= GOAL,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
