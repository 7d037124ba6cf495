"""Which function has the bug? A study for a GPU, with a model that the product does not bundle.

    python scripts/fetch_models.py qwen2.5-coder-1.5b
    python scripts/bug_location --device cuda --rows bugs.jsonl

bug_location.py asks and judges, bug_questions.py makes the questions, mutations.py the bugs.
"""

from __future__ import annotations

from bug_location import GOAL
from kvboost.bench.kit.benchmark import Benchmark
from kvboost.cli.bench import command_of

BENCHMARK = Benchmark(
    "bug-location",
    "Does a model that reuses moved files still find the function with the bug?",
    "bug_location",
    goals=(GOAL,),
)

if __name__ == "__main__":
    command_of(BENCHMARK)()
