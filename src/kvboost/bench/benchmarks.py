"""The list of the benchmarks of this package: the command line and the docs read it.

To add a benchmark, write its module (see kit/benchmark.py) and add an entry here; one that only
people who work on KVBoost run belongs into ``benchmarks/`` at the root of the repository.
"""

from __future__ import annotations

from kvboost.bench.kit.benchmark import Benchmark

_ENTRIES = (
    Benchmark(
        "ttft",
        "How soon does the first token come, against stock transformers and other engines?",
        "kvboost.bench.ttft.run",
        goals=(
            "exact hits at 2,048 tokens at least 8 × faster to first token than stock transformers",
            "exact hits at 2,048 tokens faster than every peer's warm prefix",
            "moved and reordered text at 2,048 tokens at least 3 × faster than the best peer",
            "chat turn 8 takes at most 1.3 × as long as turn 2",
            "answers decoded together at least 3 × as fast as one after the other",
        ),
    ),
    Benchmark(
        "quality",
        "How far are answers over reused text from those of a full prefill?",
        "kvboost.bench.quality.deviation",
    ),
    Benchmark(
        "serve",
        "How do servers compare under the same load: ours, vLLM and llama.cpp?",
        "kvboost.bench.serve.run",
        goals=(
            "rag: p50 TTFT at most 0.4 of vllm's",
            "rag: the most requests/s of all",
            "chat: p50 TTFT at most vllm's",
            "chat: at least vllm's requests/s",
        ),
    ),
    Benchmark(
        "agent",
        "How soon does each turn of a coding agent begin: ours, vLLM and llama.cpp?",
        "kvboost.bench.agent.run",
        goals=(
            "append: the first tokens of a session's turns no later than vllm's",
            "files: the first tokens of a session's turns no later than vllm's",
        ),
    ),
)

BENCHMARKS = {benchmark.name: benchmark for benchmark in _ENTRIES}
