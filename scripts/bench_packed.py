"""What packed weights cost and save for one model: accuracy, memory, start and speed.

    python scripts/bench_packed.py [MODEL] [--rows 512] [--tokens 32] [--rounds 3]

MODEL is a GGUF file or the name of an installed model. Packed and plain weights, and llama.cpp with
the same file if ``make peers`` has installed it, run in processes of their own that take turns. It
prints

- the mean KL of the next token's distribution over a real text: packed weights against the same
  codes, dequantised, with torch's products
- the largest memory of the process, divided by the file's size, and how much of it Python and the
  libraries took before the model was loaded
- seconds from the start of the process to the first token, from a warm file cache
- seconds to read a prompt and to decode a token, and their ratios.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PLAIN, PACKED, LLAMA = "plain", "packed", "llama.cpp"
DIVERGENCE = "divergence"


def text() -> str:
    """English prose and code, the same for everybody."""
    return (ROOT / "docs" / "architecture.md").read_text()


def memory_of(field: str) -> int:
    """Bytes of this process, as Linux counts them."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def run_kvboost(given: dict[str, Any]) -> dict[str, Any]:
    from kvboost import KVBoost

    before = memory_of("VmRSS")
    with KVBoost.from_pretrained(given["model"], weights=given["form"], speculate="off") as engine:
        engine.generate("Once upon a time", 1)
        ready = time.time() - given["started"]
        found = {"start_s": ready, "peak_bytes": memory_of("VmHWM"), "before_bytes": before}
        found |= {"weights": engine.facts()["weights"], "dtype": engine.facts()["dtype"]}
        ids = engine.encode(text())[: given["rows"]]
        reads, decodes = [], []
        for number in range(given["rounds"]):
            some = [ids[number], *ids[1:]]  # another beginning: nothing is reused
            result = engine.generate(
                some, given["tokens"], "prefix_cache", ignore_eos=True, keep=False
            )
            reads.append(result.ttft_ms / 1e3)
            decodes.append((result.total_ms - result.ttft_ms) / 1e3 / (given["tokens"] - 1))
    return {**found, "read_s": statistics.median(reads), "decode_s": statistics.median(decodes)}


def run_divergence(given: dict[str, Any]) -> dict[str, Any]:
    """The mean KL of packed weights from their own dequantised numbers."""
    import torch

    from kvboost.model.load import load
    from kvboost.model.quantized import products

    packed = load(given["model"], weight_form=PACKED, device="cpu", dtype="float32")
    ids = torch.tensor(packed.tokenizer.encode(text())[: given["rows"]])[None]
    with torch.inference_mode():
        found = packed.forward.model(ids).logits[0].log_softmax(-1)
        del packed
        products.native_dtype = lambda dtype: None  # torch's products, over the same codes
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


def run_llama(given: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp, by the program with which the benchmarks call it."""
    program = ROOT / "scripts" / "peers" / "xllamacpp.py"
    spec = importlib.util.spec_from_file_location("llama_engine", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before = memory_of("VmRSS")
    context = len(given["ids"]) + given["tokens"] + 64
    settings = {"gguf": given["file"], "context": context, "least_reused": 0, "cache_bytes": 0}
    engine = module.Engine({**settings, "threads": given["threads"]})
    firsts: list[float] = []

    def answer(ids: list[int], tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and from there to the last."""
        firsts.clear()
        began = time.time()
        request = {"ids": ids, "max_tokens": tokens}
        engine.generate(request, lambda: firsts.append(time.time()))
        return firsts[0] - began, time.time() - firsts[0]

    answer(given["ids"][:4], 1)
    ready, peak = time.time() - given["started"], memory_of("VmHWM")
    reads, decodes = [], []
    for number in range(given["rounds"]):
        ids = [given["ids"][number], *given["ids"][1:]]  # another beginning: nothing is reused
        read, rest = answer(ids, given["tokens"])
        reads.append(read)
        decodes.append(rest / (given["tokens"] - 1))
    return {
        "start_s": ready,
        "peak_bytes": peak,
        "before_bytes": before,
        "weights": engine.version,
        "read_s": statistics.median(reads),
        "decode_s": statistics.median(decodes),
    }


WORKERS = {PLAIN: run_kvboost, PACKED: run_kvboost, LLAMA: run_llama, DIVERGENCE: run_divergence}


def run_worker(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Runs this file again in a process of its own; what it prints last is its result."""
    from kvboost.bench.peers.environments import LLAMA_CPP, peer_python

    python = str(peer_python(LLAMA_CPP)) if name == LLAMA else sys.executable
    given = {**given, "form": name, "started": time.time()}
    command = [python, __file__, "--worker", name]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from kvboost.bench.peers.environments import LLAMA_CPP, why_missing
    from kvboost.model.load import load_tokenizer
    from kvboost.model.weights import known_names, pull_gguf

    named = options.model in known_names()
    file = pull_gguf(options.model) if named else Path(options.model).resolve()
    given = {"model": options.model if named else str(file), "file": str(file)}
    given |= {"rows": options.rows, "tokens": options.tokens, "rounds": options.rounds}
    given |= {"ids": load_tokenizer(given["model"]).encode(text())[: options.rows]}
    given |= {"threads": torch.get_num_threads()}
    names = [name for name in (PACKED, PLAIN, LLAMA) if name in options.only]
    if LLAMA in names and (reason := why_missing(LLAMA_CPP)):
        print(f"llama.cpp: {reason}")
        names.remove(LLAMA)
    found: dict[str, Any] = {"file_bytes": file.stat().st_size, "threads": given["threads"]}
    for name in [*names, *names]:  # twice: the first start fills caches of files and kernels
        found[name] = run_worker(name, given)
    if options.divergence:
        found[DIVERGENCE] = run_worker(DIVERGENCE, given)
    return found


def show(found: dict[str, Any]) -> None:
    size = found["file_bytes"]
    print(f"file {size / 1e6:,.0f} MB, {found['threads']} threads")
    base = found.get(PACKED)
    for name in (PACKED, PLAIN, LLAMA):
        if name not in found:
            continue
        one = found[name]
        loaded = (one["peak_bytes"] - one["before_bytes"]) / size
        print(
            f"{name:9} start {one['start_s']:6.2f} s  memory / file {one['peak_bytes'] / size:5.2f}"
            f" ({loaded:4.2f} without libraries)  read {one['read_s']:7.3f} s  "
            f"decode {one['decode_s'] * 1e3:7.1f} ms  [{one['weights']}]"
        )
        if base is not None and name != PACKED:
            keys = ("start_s", "read_s", "decode_s")
            ratios = [f"{key[:-2]} {base[key] / one[key]:.2f}" for key in keys]
            print(f"{'':9} packed / {name}: {', '.join(ratios)}")
    if DIVERGENCE in found:
        kl = found[DIVERGENCE]
        print(
            f"KL from dequantised weights: mean {kl['mean_kl']:.5f}, median {kl['median_kl']:.5f} "
            f"over {kl['rows']} rows; {kl['same_first_choice']:.1%} have the same likeliest token"
        )


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(WORKERS[sys.argv[2]](json.load(sys.stdin))))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rows", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of the answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=[PACKED, PLAIN, LLAMA])
    parser.add_argument("--no-divergence", dest="divergence", action="store_false")
    found = measure(parser.parse_args())
    show(found)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
