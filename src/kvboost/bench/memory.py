"""Bytes: of a token in the cache by bits, and of a whole process at its peak, each against what one
would expect.

Every setting runs in a process of its own, since a peak cannot be taken back. What a process holds
is what the system says (resident pages, those of mapped weight files included).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kvboost import KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.plots import check_plot
from kvboost.bench.record import record
from kvboost.bench.resident import resident_mb
from kvboost.bench.study_plots import plot_memory
from kvboost.bench.study_report import memory_tables
from kvboost.bench.workloads import PATTERNS, fragments, question
from kvboost.cache.quantize import GROUP
from kvboost.config import KV_BITS, EngineConfig, one_of, whole
from kvboost.errors import KVBoostError
from kvboost.model.fast_layers import PackedLinear
from kvboost.model.kv import KVShape
from kvboost.model.load import LoadedModel, load
from kvboost.progress import Progress

QUESTION_TOKENS = 32
ANSWER_TOKENS = 16
ALL_CHUNKS = 1_000_000
RANGE_BYTES = 2 * 2
"""Least value and step, a half each."""


def expected_bytes_per_token(shape: KVShape, bits: int) -> float:
    """What a row of a whole chunk takes. Packed, keys share a range per channel in groups of
    tokens, values have one per row."""
    if bits == 16:
        return float(shape.row_bytes)
    heads = shape.num_layers * shape.num_kv_heads
    codes = 2 * heads * shape.head_dim * bits / 8
    return codes + heads * shape.head_dim * RANGE_BYTES / GROUP + heads * RANGE_BYTES


@dataclass(frozen=True)
class Memory:
    """One setting, in megabytes. The first five make the prediction."""

    bits: int
    tokens: int
    libraries: float
    """The process before any weight was loaded."""
    weights: float
    packed: float
    """The second copy of linear layers, in the order the CPU's matrix units want."""
    kv: float
    """Of the one running request."""
    cache: float
    """All rows of it, kept."""
    load_peak: float
    """Highest until the model was ready."""
    serve_peak: float
    """Highest from then on."""
    bytes_per_token: float
    expected_bytes_per_token: float
    machine: dict[str, Any]

    @property
    def predicted(self) -> float:
        return self.libraries + self.weights + self.packed + self.kv + self.cache

    @property
    def difference(self) -> float:
        """What serving took beyond the prediction."""
        return self.serve_peak - self.predicted

    def as_json(self) -> dict[str, Any]:
        own = {name: value for name, value in asdict(self).items() if name != "machine"}
        return {**own, "predicted": self.predicted, "difference": self.difference}


def measure_memory(model: str, bits: int, tokens: int, dtype: str | None) -> Memory:
    """One setting, in this process, which should have done nothing else before: a document is asked
    about twice, new and then known."""
    libraries = resident_mb()
    loaded = load(model, device="cpu", dtype=dtype)
    load_peak = peak_mb()
    resets_peaks = forget_peak()
    shape = loaded.forward.shape
    with KVBoost(loaded, EngineConfig(kv_cache_bits=bits, max_cache_bytes=1 << 40)) as engine:
        encode = fragments(engine.encode)
        document = PATTERNS["code"].shared(encode, tokens)
        prompt = document + question(encode, 0, QUESTION_TOKENS)
        for _ in range(2):
            engine.generate(prompt, ANSWER_TOKENS, ignore_eos=True)
        stored = engine.chunks(ALL_CHUNKS)
        serve_peak = peak_mb()
        size = engine.config.chunk_size
    # The first chunk keeps its first rows in full, and the last is not whole.
    usual = [one for one in stored if one["position"] and one["tokens"] == size]
    row = expected_bytes_per_token(shape, bits)
    rows = len(prompt) + ANSWER_TOKENS
    return Memory(
        bits,
        tokens,
        libraries,
        weights_mb(loaded),
        packed_mb(loaded),
        rows * shape.row_bytes / 1e6,
        rows * row / 1e6,
        load_peak,
        serve_peak,
        sum(one["bytes"] for one in usual) / sum(one["tokens"] for one in usual),
        row,
        {**describe(loaded.device, shape.dtype), "kernel_resets_peaks": resets_peaks},
    )


def weights_mb(loaded: LoadedModel) -> float:
    return float(sum(weight.nbytes for weight in loaded.forward.model.parameters()) / 1e6)


def packed_mb(loaded: LoadedModel) -> float:
    layers = loaded.forward.model.modules()
    return float(sum(one.weight.nbytes for one in layers if isinstance(one, PackedLinear)) / 1e6)


def peak_mb() -> float:
    """The most this process held since it began, or since :func:`forget_peak`."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def forget_peak() -> bool:
    """Asks the kernel to count the peak anew from here on. Returns whether it did: not every
    kernel has this, and some accept the request and ignore it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return peak_mb() <= 1.05 * resident_mb()


def run_memory(
    model: str,
    bits: Sequence[int],
    tokens: Sequence[int],
    console: Console,
    *,
    plot: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    for one in bits:
        one_of(one, KV_BITS, "bits")
    for length in tokens:
        whole(length, 3 * EngineConfig().chunk_size, "tokens")
    if plot is not None:
        check_plot(plot)
    settings = [(one, length) for length in tokens for one in bits]
    with (
        Progress("a process for every setting, on the CPU") as progress,
        progress.step("processes", len(settings)) as step,
    ):
        rows = []
        for one, length in settings:
            rows.append(_in_a_process(model, one, length, dtype))
            step.advance()
    console.print(rows[0].machine)
    for table in memory_tables(rows):
        console.print(table)
    console.print(
        "libs: Python, torch and the rest before weights were loaded; packed: linear layers laid "
        "out for the CPU's matrix units; kv: the running request's; cache: what is kept of it. "
        "What the peak has more: the rows of a forward between its layers, logits, torch's "
        "kernels, and heap that was freed and not given back. loading: the peak until the model "
        "was ready.",
        style="dim",
        highlight=False,
    )
    if not rows[0].machine["kernel_resets_peaks"]:
        console.print("! this kernel does not reset peaks: each includes loading the model")
    if plot is not None:
        plot_memory(rows, plot, title=f"{model}: memory at its peak")
        console.print(f"drawn in {plot}", highlight=False)
    return record("memory", model, rows[0].machine, rows=[row.as_json() for row in rows])


def _in_a_process(model: str, bits: int, tokens: int, dtype: str | None) -> Memory:
    given = json.dumps([model, bits, tokens, dtype])
    command = [sys.executable, "-m", "kvboost.bench.memory", given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KVBoostError(f"the process for {bits} bits failed:\n{done.stderr[-2000:]}")
    return Memory(**json.loads(done.stdout.strip().splitlines()[-1]))


if __name__ == "__main__":
    print(json.dumps(asdict(measure_memory(*json.loads(sys.argv[1])))))
