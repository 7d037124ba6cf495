"""The list of all benchmarks: those of ``kvboost bench``, and those of this folder.

To add one, write its module, with ``Settings`` and ``run`` (see ``kvboost.bench.kit.benchmark``),
and add an entry here.
"""

from __future__ import annotations

from kvboost.bench import benchmarks
from kvboost.bench.kit.benchmark import Benchmark

_ENTRIES = (
    Benchmark(
        "vllm",
        "What does KVBoost save inside vLLM, and what does it cost vLLM?",
        "benchmarks.vllm",
        goals=(
            "moved text at 2,048 tokens in vLLM (H200, 7B): at most 0.6 of a full prefill",
            "moved text at 8,192 tokens in vLLM (H200, 7B): at most 0.33 of a full prefill",
            "moved text at 32,768 tokens in vLLM (H200, 7B): at most 0.25 of a full prefill",
            "new prompts in vLLM take at most 1.03 × as long with the connector",
            "a step of 64 decoding requests in vLLM takes at most 1.03 × as long with it",
            "a restarted vLLM has 4,096 tokens from disk in at most 0.15 of a full prefill",
        ),
    ),
    Benchmark(
        "gpu",
        "How fast are reading, known and moved text and decoding on a GPU, against vLLM?",
        "benchmarks.gpu",
        goals=(
            "decoding one request: at most 1.15 × vLLM's time per token",
            "decoding 64 requests: at most 1.25 × vLLM's time per step",
            "reading 8,192 tokens: at most 1.1 × vLLM's time",
            "8,192 tokens with a known beginning, in GPU memory: at most 1.1 × vLLM's time",
            "the same in pinned RAM (7B): at most 0.15 of vLLM's time to read them",
            "8,192 tokens of moved text (7B): at most 0.30 of vLLM's time",
            "8,192 tokens of moved text (1.5B): at most 0.45 of vLLM's time",
            "32,768 tokens of moved text: at most 0.25 of vLLM's time",
            "2,048 tokens of moved text (7B): at most 0.6 of vLLM's time",
        ),
    ),
    Benchmark(
        "far",
        "How fast are answers whose KV is larger than the GPU's memory?",
        "benchmarks.far",
        goals=(
            "256k tokens, 7B shape, 8 GiB: at most 1.3 × the better of the two bandwidth limits",
            "256k tokens, 7B shape, 8 GiB: at least 2 × transformers' offloaded cache",
            "the peak of the GPU's memory is within 8 GiB",
        ),
    ),
    Benchmark(
        "larger",
        "How fast is a model that is larger than the GPU's memory?",
        "benchmarks.larger.run",
        goals=(
            "32B shape, 4 bits, 8 GiB: at least 90 % of what the bus carries",
            "32B shape, 4 bits, 8 GiB: at least 3.9 tokens/s, one greedy request",
            "8 requests at least 7 × as many tokens/s as one",
            "an edit of code, drafted: at least 2 × as many tokens/s",
            "the peak of reserved memory is within device_memory",
        ),
    ),
    Benchmark(
        "faults",
        "Do answers and cache survive kill -9, full disks, a dying Redis, forks and Ctrl-C?",
        "benchmarks.faults.run",
    ),
    Benchmark(
        "soak",
        "Do memory, budgets and answers stay sound over minutes of mixed requests?",
        "benchmarks.soak",
        long_running=True,
    ),
    Benchmark(
        "overload", "Is everything answered or refused under too much load?", "benchmarks.overload"
    ),
    Benchmark(
        "kernels",
        "What do our kernels for CPUs gain over torch?",
        "benchmarks.kernels",
        goals=(
            "a decode step: at most 0.8 of torch's time",
            "moved text: at most 0.8 of torch's time",
            "reading: at most torch's time",
        ),
    ),
    Benchmark("images", "What does reuse save of a prompt with an image?", "benchmarks.images"),
    Benchmark("states", "What does a model with states save when it resumes?", "benchmarks.states"),
    Benchmark(
        "arena",
        "How does KVBoost score in KVShareArena, against other ways to reuse KV?",
        "benchmarks.arena",
    ),
)

BENCHMARKS = benchmarks.BENCHMARKS | {benchmark.name: benchmark for benchmark in _ENTRIES}
