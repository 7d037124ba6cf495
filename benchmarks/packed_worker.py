"""A contender of ``packed.py``, in the process that is measured: ``packed_worker.py NAME``.

JSON lines: what to load, then one question at a time. Only Python is needed for llama.cpp's.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from functools import cached_property
from pathlib import Path
from typing import Any

PACKED, LLAMA, DIVERGENCE = "packed", "llama.cpp", "divergence"
PR_SET_PDEATHSIG = 1
PEER = Path(__file__).resolve().parents[1] / "scripts" / "peers" / "xllamacpp.py"


def memory_of(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


class Ours:
    """KVBoost, in the process that is measured."""

    def __init__(self, given: dict[str, Any]) -> None:
        from kvboost import KVBoost

        self.before = memory_of("VmRSS")
        self._engine = KVBoost.from_pretrained(
            given["model"], weights=given["form"], speculate="off", heal="off"
        )

    @cached_property
    def weights(self) -> str:
        facts = self._engine.facts()
        return f"{facts['weights']}, {facts['dtype']}"

    def answer(self, ids: list[int], tokens: int, moves: bool = False) -> dict[str, Any]:
        """Without ``moves``, only a beginning that is known is reused."""
        mode = "chunk_kv_reuse" if moves else "prefix_cache"
        result = self._engine.generate(ids, tokens, mode, ignore_eos=True)
        reused = round(result.kv_reuse_ratio * len(ids))
        rest = result.total_ms - result.ttft_ms
        return {"first_s": result.ttft_ms / 1e3, "rest_s": rest / 1e3, "reused": reused}

    def together(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        results = self._engine.generate_batch(prompts, tokens, "prefix_cache", ignore_eos=True)
        firsts = max(result.ttft_ms for result in results)
        rest = max(result.total_ms for result in results) - firsts
        return {"first_s": firsts / 1e3, "rest_s": rest / 1e3}


class Llama:
    """llama.cpp, by the program with which the benchmarks call it."""

    def __init__(self, given: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("llama_engine", PEER)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.before = memory_of("VmRSS")
        self._engine = module.Engine({**given, "least_reused": 0, "cache_bytes": 0})
        self.weights = self._engine.version

    def answer(self, ids: list[int], tokens: int, moves: bool = False) -> dict[str, Any]:
        firsts: list[float] = []
        began = time.perf_counter()
        said = self._engine.generate(
            {"ids": ids, "max_tokens": tokens}, lambda: firsts.append(time.perf_counter())
        )
        rest = time.perf_counter() - firsts[0]
        return {"first_s": firsts[0] - began, "rest_s": rest, "reused": said["cached_tokens"]}

    def together(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda ids=ids: answers.append(self.answer(ids, tokens)))
            for ids in prompts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(answers) < len(prompts):
            raise RuntimeError(f"{len(prompts) - len(answers)} of {len(prompts)} requests failed")
        firsts = max(answer["first_s"] for answer in answers)
        rest = max(answer["first_s"] + answer["rest_s"] for answer in answers) - firsts
        return {"first_s": firsts, "rest_s": rest}


def serve(given: dict[str, Any], answers: Any) -> None:
    """Loads an engine and answers one question a line."""

    def say(found: dict[str, Any]) -> None:
        answers.write(json.dumps(found) + "\n")
        answers.flush()

    engine: Ours | Llama = (Llama if given["form"] == LLAMA else Ours)(given)
    engine.answer(given["ids"], 1)
    ready = {"start_s": time.time() - given["started"], "start_cpu_s": time.process_time()}
    memory = {"peak_bytes": memory_of("VmHWM"), "before_bytes": engine.before}
    say({**ready, **memory, "weights": engine.weights})
    for line in sys.stdin:
        ((what, asked),) = json.loads(line).items()
        began = time.process_time()
        found = getattr(engine, what)(**asked)
        say({**found, "cpu_s": time.process_time() - began})


def divergence(given: dict[str, Any]) -> dict[str, Any]:
    """The mean KL of packed weights from their own dequantised numbers."""
    import torch

    from kvboost.model.loading.load import load
    from kvboost.model.quantized import products

    packed = load(given["model"], weight_form=PACKED, device="cpu", dtype="float32")
    ids = torch.tensor(given["ids"])[None]
    with torch.inference_mode():
        found = packed.forward.model(ids).logits[0].log_softmax(-1)
        del packed
        products.native_dtype = lambda *_: None  # torch's products, over the same codes
        exact = load(given["model"], weight_form=PACKED, device="cpu", dtype="float32")
        expected = exact.forward.model(ids).logits[0].log_softmax(-1)
    each = (expected.exp() * (expected - found)).sum(-1)
    same = found.argmax(-1) == expected.argmax(-1)
    return {
        "mean_kl": float(each.mean()),
        "median_kl": float(each.median()),
        "same_first_choice": float(same.float().mean()),
        "rows": len(each),
    }


def die_with_parent() -> None:
    """A process that is stopped does not notice that its pipe was closed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(name: str) -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is not an answer
    given = json.loads(sys.stdin.readline())
    if name == DIVERGENCE:
        answers.write(json.dumps(divergence(given)) + "\n")
    else:
        serve(given, answers)


if __name__ == "__main__":
    main(sys.argv[1])
