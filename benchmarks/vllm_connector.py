"""KVBoost inside vLLM against plain vLLM: runs in an environment that has vLLM.

    python -m benchmarks.vllm_connector --shape 7b --lengths 2048,8192,32768

Prompts are a header, eight passages and a question. The passages are read once; then they come in
other orders after other headers, with the connector and without it in turns, each time with vLLM's
own prefix cache empty. Weights are random unless ``--model`` names a folder: speed depends on
shapes alone. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from itertools import chain
from typing import Any

from benchmarks.shapes import EXPERTS, SHAPES, config_of
from kvboost.config import DEFAULT_RATIO

PASSAGES = 8
HEADER = QUESTION = 32
ALONE, TOGETHER = 2048, 512
"""Tokens before the answer of a request that decodes alone, and of several (``--steps``)."""


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model's folder; without it, random weights")
    parser.add_argument("--shape", choices=(*SHAPES, *EXPERTS), default="7b")
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ratio", type=float, default=DEFAULT_RATIO)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpu-cache", default="24GiB", help="chunks kept on the GPU")
    parser.add_argument("--memory", type=float, default=0.7, help="vLLM's share of the GPU")
    parser.add_argument("--decoding", type=int, default=64, help="requests that decode together")
    parser.add_argument("--steps", help="numbers of requests that decode, after longer prompts")
    parser.add_argument("--folder", help="chunks on disk, which outlive the process")
    parser.add_argument(
        "--restart", choices=("write", "read"), help="write documents to --folder, or read them"
    )
    parser.add_argument("--plain", action="store_true", help="without the connector")
    parser.add_argument("--eager", action="store_true", help="do not compile the model")
    return parser


def main() -> None:
    options = arguments().parse_args()
    lengths = [int(length) for length in options.lengths.split(",")]
    llm = start(options, max(*lengths, ALONE if options.steps else 0))
    import vllm

    report: dict[str, Any] = {"shape": options.shape, "plain": options.plain}
    report["version"] = vllm.__version__
    if options.restart:
        report["restart"] = restart(llm, options, max(lengths))
        llm.llm_engine.engine_core.shutdown()  # writes what is not written yet
        print(json.dumps(report))
        return
    for requests in map(int, options.steps.split(",") if options.steps else ()):
        before = ALONE if requests == 1 else TOGETHER
        report.setdefault("steps", {})[requests] = decode(llm, requests, before)["step_ms"]
    report["decode"] = decode(llm, options.decoding)
    for length in lengths:
        report[str(length)] = measure(llm, options, length)
        print(json.dumps({str(length): report[str(length)]}), flush=True)
    print(json.dumps(report))


def start(options: argparse.Namespace, longest: int) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    more: dict[str, Any] = {}
    if not options.plain:
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KVBoostConnector",
            kv_connector_module_path="kvboost.integrations.vllm.connector",
            kv_role="kv_both",
            kv_connector_extra_config={
                "recompute_strategy": "query",  # random weights tell "auto" nothing
                "recompute_ratio": options.ratio,
                "reuse_moved": "always",
                "max_cache_bytes": "16GiB",
                "gpu_cache_bytes": options.gpu_cache,
                "disk_cache_dir": options.folder,
            },
        )
    if not options.model and options.shape in EXPERTS:
        _spread_weights()
    if not options.model:
        more |= {"load_format": "dummy", "skip_tokenizer_init": True}
    return LLM(
        model=options.model or make_shape(options.shape),
        dtype=options.dtype,
        max_model_len=longest + 1024,
        gpu_memory_utilization=options.memory,
        max_num_batched_tokens=16384,
        max_num_seqs=256,
        enforce_eager=options.eager,
        disable_log_stats=True,
        **more,
    )


def _spread_weights() -> None:
    """Makes vLLM's random weights as large as those of transformers. They are so small that all
    tokens choose the same experts, so that a step of many requests reads a few of them only."""
    from vllm.model_executor.model_loader import dummy_loader

    fill = dummy_loader.initialize_dummy_weights

    def spread(model: Any, config: Any) -> None:
        fill(model, config, low=-0.035, high=0.035)
        if type(model).__name__.endswith("Norm"):
            model.weight.data.fill_(1)

    dummy_loader.initialize_dummy_weights = spread


def make_shape(shape: str) -> str:
    """A folder with the config of a model of this shape."""
    folder = os.path.join(tempfile.gettempdir(), f"kvboost-shape-{shape}")
    config = config_of(shape)
    config.bos_token_id, config.eos_token_id = 1, 2
    config.save_pretrained(folder)
    return folder


def ask(llm: Any, prompts: list[list[int]], mode: str, tokens: int = 1) -> tuple[float, Any]:
    """Milliseconds until all are answered, and the answers."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kvboost": mode},
    )
    started = time.perf_counter()
    answers = llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)
    return (time.perf_counter() - started) * 1e3, answers


def random_tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(300, 40_000) for _ in range(number)]


def decode(llm: Any, requests: int, before: int = 64, tokens: int = 64) -> dict[str, float]:
    """Milliseconds of one step of ``requests`` that decode together after ``before`` tokens."""
    rng = random.Random(2)
    prompts = [random_tokens(rng, before) for _ in range(requests)]
    steps = []
    for _ in range(3):
        one, _ = ask(llm, prompts, "off", 1)
        many, _ = ask(llm, prompts, "off", 1 + tokens)
        steps.append((many - one) / tokens)
    return {"requests": requests, "step_ms": round(statistics.median(steps), 3)}


def measure(llm: Any, options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Time to the first token: all new, and with eight passages that were read before. Without the
    connector, also of a prompt whose beginning vLLM's own prefix cache has."""
    rng = random.Random(length)
    passages = [
        random_tokens(rng, (length - HEADER - QUESTION) // PASSAGES) for _ in range(PASSAGES)
    ]

    def prompt(order: list[list[int]]) -> list[int]:
        tokens = chain.from_iterable(order)
        return [*random_tokens(rng, HEADER), *tokens, *random_tokens(rng, QUESTION)]

    times: dict[str, list[float]] = {"cold": [], "off": [], "known": [], "moved": []}
    used: dict[str, Any] = {}

    def settle() -> None:
        """A short request: its step stores what the last one read, which must not count."""
        ask(llm, [random_tokens(rng, 64)], "off")
        time.sleep(0.02 + length / 65536)

    ask(llm, [prompt(passages)], "repaired")
    settle()
    for number in range(options.rounds):
        order = rng.sample(passages, len(passages))
        asked = prompt(order)
        fresh = random_tokens(rng, length)
        for name, mode, tokens in (
            ("cold", "repaired", fresh),
            ("off", "off", asked),
            ("known", "off", [*asked[:-QUESTION], *random_tokens(rng, QUESTION)]),
            ("moved", "repaired", asked),
        ):
            if name == ("moved" if options.plain else "known"):
                continue
            if name != "known":
                llm.reset_prefix_cache()
            milliseconds, answers = ask(llm, [tokens], mode)
            if number:
                times[name].append(milliseconds)
            if name == "moved":
                used = (answers[0].kv_transfer_params or {}).get("kvboost", {})
                assert used.get("moved_tokens", 0) > length // 2, f"little was moved: {used}"
            settle()
    report: dict[str, Any] = {
        f"{name}_ms": round(statistics.median(some), 1) for name, some in times.items() if some
    }
    if not options.plain:
        report["moved_over_off"] = round(report["moved_ms"] / report["off_ms"], 3)
        report |= used
    return report


def restart(llm: Any, options: argparse.Namespace, length: int) -> dict[str, Any]:
    """Time to the first token over documents that another process has written to the folder, each
    read once, and over unknown ones, in turns."""
    rng = random.Random(options.restart)
    documents = [
        random_tokens(random.Random(number), length) for number in range(max(3, options.rounds))
    ]
    if options.restart == "write":
        for document in documents:
            ask(llm, [document], "exact")
        ask(llm, [random_tokens(rng, 64)], "off")  # its step stores the last one
        return {"documents": len(documents)}
    times: dict[str, list[float]] = {"full": [], "disk": []}
    ask(llm, [random_tokens(rng, length + QUESTION)], "off")  # compiles what is not yet
    for document in documents:
        for name, mode, text in (
            ("full", "off", random_tokens(rng, length)),
            ("disk", "exact", document),
        ):
            milliseconds, answers = ask(llm, [[*text, *random_tokens(rng, QUESTION)]], mode)
            times[name].append(milliseconds)
        used = (answers[0].kv_transfer_params or {}).get("kvboost", {})
        assert used.get("exact_tokens", 0) > 0.9 * length, f"little was on disk: {used}"
    medians = {f"{name}_ms": round(statistics.median(some), 1) for name, some in times.items()}
    return {"tokens": length, "documents": len(documents), **medians}


if __name__ == "__main__":
    main()
