"""How long a JSON answer takes, relative to free text of the same length.

Each round asks for both, one after the other, on one engine; the prompt is cached. Prints the
median of the rounds' ratios of decode times, the forwards of each, and the time of a mask. The last
line is JSON.

    python scripts/bench_structured.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
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
        self._engine = engine
        self._run = engine._model.forward.run
        self.forwards = 0

    def __enter__(self) -> Counted:
        def counted(segments: Any) -> Any:
            self.forwards += 1
            return self._run(segments)

        self._engine._model.forward.run = counted  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        del self._engine._model.forward.run


def ask(engine: KVBoost, tokens: int, **options: Any) -> tuple[GenerationResult, int]:
    with Counted(engine) as counted:
        result = engine.chat(MESSAGES, tokens, **options)
    return result, counted.forwards


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with KVBoost.from_pretrained(options.model) as engine:
        ask(engine, 200, schema=SCHEMA)  # compiles the grammar and fills the cache
        ratios = []
        for number in range(options.rounds):
            answer, forwards = ask(engine, 200, schema=SCHEMA)
            tokens = len(answer.token_ids)
            free, free_forwards = ask(engine, tokens, ignore_eos=True)
            ratios.append(answer.timings.decode_ms / free.timings.decode_ms)
            print(
                f"round {number + 1}: {tokens} tokens, JSON {answer.timings.decode_ms:,.0f} ms in "
                f"{forwards} forwards, free text {free.timings.decode_ms:,.0f} ms in "
                f"{free_forwards}"
            )
        mask = mask_seconds(engine, answer)
    ratio = statistics.median(ratios)
    print(f"JSON takes {ratio:.2f} of the time of free text (goal: at most {GOAL})")
    report = {
        "ratio": round(ratio, 3),
        "ratios": [round(one, 3) for one in ratios],
        "tokens": tokens,
        "forwards": forwards,
        "free_forwards": free_forwards,
        "mask_us": round(mask * 1e6, 1),
        "goal_met": ratio <= GOAL,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
