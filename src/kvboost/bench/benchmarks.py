"""The one list of benchmarks: the command line, ``bench all`` and the docs read it.

To add a benchmark, write its module (see kit/benchmark.py) and add an entry here.
"""

from __future__ import annotations

from kvboost.bench.kit.benchmark import Benchmark

_ENTRIES = (
    Benchmark(
        "ttft",
        "How soon does the first token come, against stock transformers and other engines?",
        "kvboost.bench.speed.ttft.run",
        goals=(
            "exact hits at 2,048 tokens at least 8 × faster to first token than stock transformers",
            "exact hits at 2,048 tokens faster than every peer's warm prefix",
            "moved and reordered text at 2,048 tokens at least 3 × faster than the best peer",
            "chat turn 8 takes at most 1.3 × as long as turn 2",
            "answers decoded together at least 3 × as fast as one after the other",
        ),
        in_all="--peers --rounds 5",
        seconds=1900,
        quick="--quick",
        quick_seconds=60,
        plots=True,
    ),
    Benchmark(
        "vllm",
        "What does KVBoost save inside vLLM, and what does it cost vLLM?",
        "kvboost.bench.speed.vllm",
        goals=(
            "moved text at 2,048 tokens in vLLM (H200, 7B): at most 0.6 of a full prefill",
            "moved text at 8,192 tokens in vLLM (H200, 7B): at most 0.33 of a full prefill",
            "moved text at 32,768 tokens in vLLM (H200, 7B): at most 0.25 of a full prefill",
            "new prompts in vLLM take at most 1.03 × as long with the connector",
            "a step of 64 decoding requests in vLLM takes at most 1.03 × as long with it",
            "a restarted vLLM has 4,096 tokens from disk in at most 0.15 of a full prefill",
            "16 users with prompts of 8,192 tokens are served at least 1.8 × as fast (H200, 1.5B)",
        ),
    ),
    Benchmark(
        "gpu",
        "How fast are reading, known and moved text and decoding on a GPU, against vLLM?",
        "kvboost.bench.speed.gpu",
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
        plots=True,
    ),
    Benchmark(
        "far",
        "How fast are answers whose KV is larger than the GPU's memory?",
        "kvboost.bench.speed.far",
        goals=(
            "256k tokens, 7B shape, 8 GiB: at most 1.3 × the better of the two bandwidth limits",
            "256k tokens, 7B shape, 8 GiB: at least 2 × transformers' offloaded cache",
            "the peak of the GPU's memory is within 8 GiB",
        ),
        plots=True,
    ),
    Benchmark(
        "larger",
        "How fast is a model that is larger than the GPU's memory?",
        "kvboost.bench.speed.larger.run",
        goals=(
            "32B shape, 4 bits, 8 GiB: at least 90 % of what the bus carries",
            "32B shape, 4 bits, 8 GiB: at least 3.9 tokens/s, one greedy request",
            "8 requests at least 7 × as many tokens/s as one",
            "an edit of code, drafted: at least 2 × as many tokens/s",
            "the peak of reserved memory is within device_memory",
        ),
        plots=True,
    ),
    Benchmark(
        "quality",
        "How far are answers over reused text from those of a full prefill?",
        "kvboost.bench.quality.deviation",
        in_all="--limit 10",
        seconds=300,
        plots=True,
    ),
    Benchmark(
        "shuffles",
        "Does reuse decay over a long stream of ever new orders, and what is lost at seams?",
        "kvboost.bench.quality.shuffles",
    ),
    Benchmark(
        "serve",
        "How do servers compare under the same load: ours, vLLM and llama.cpp?",
        "kvboost.bench.load.serve.run",
        goals=(
            "rag: p50 TTFT at most 0.4 of vllm's",
            "rag: the most requests/s of all",
            "chat: p50 TTFT at most vllm's",
            "chat: at least vllm's requests/s",
        ),
        in_all="--rounds 1 --requests 3 --seconds 90",
        seconds=600,
        plots=True,
    ),
    Benchmark(
        "agent",
        "How soon does each turn of a coding agent begin: ours, vLLM and llama.cpp?",
        "kvboost.bench.load.agent.run",
        goals=(
            "append: the first tokens of a session's turns no later than vllm's",
            "files: the first tokens of a session's turns no later than vllm's",
        ),
        in_all="--rounds 1",
        seconds=600,
        plots=True,
    ),
    Benchmark(
        "cluster",
        "What does routing by content gain over taking turns, and what if a server is killed?",
        "kvboost.bench.load.cluster",
        goals=(
            "content routing: at least 1.6 × the share of tokens not computed of round robin",
            "a server killed under load: every request answered or failed with a retryable error; "
            "none wrong",
        ),
        in_all="",
        seconds=240,
    ),
    Benchmark(
        "faults",
        "Do answers and cache survive kill -9, full disks, a dying Redis, forks and Ctrl-C?",
        "kvboost.bench.load.faults",
        long_running=True,
    ),
    Benchmark(
        "soak",
        "Do memory, budgets and answers stay sound over minutes of mixed requests?",
        "kvboost.bench.load.soak",
        long_running=True,
    ),
    Benchmark(
        "restart",
        "How fast is the first request of a new process whose cache is on disk?",
        "kvboost.bench.cache.restart",
        in_all="",
        seconds=60,
        quick="--quick",
        quick_seconds=30,
    ),
)

BENCHMARKS = {benchmark.name: benchmark for benchmark in _ENTRIES}
