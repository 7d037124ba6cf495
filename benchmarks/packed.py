"""Packed weights of a GGUF file beside plain weights and beside llama.cpp with the same file.

    python -m benchmarks packed [MODEL] [--rows 512 2048] [--moved 1024] [--rounds 1]

MODEL is a GGUF file or the name of an installed model. Each contender is a process of its own; they
are asked in turns, and those that are not asked are stopped. llama.cpp runs if ``make peers`` has
installed it, if ``--llama-python`` names a Python that has xllamacpp, or if this Python has it. It
prints

- seconds from the start of a process to its first token, with the files of weights in the system's
  file cache and without them
- the largest memory until then, divided by the file's size, with and without what Python and the
  libraries took before the model was loaded
- seconds to read prompts of ``--rows`` tokens, to read the longest one again with another question
  (warm) or as it was (repeated), and to read passages of it in another order (moved)
- seconds to decode a token of one answer, and of each of ``--requests`` answers at once
- the mean KL of the next token's distribution over a real text: packed weights against the same
  codes, dequantised, with torch's products
- ratios of all of these, and the machine's load.

With ``--threads 1`` the ratios are also those of the processor's time, which other programs disturb
less. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("packed_worker.py")
SAFE = {**os.environ, "PYTHONSAFEPATH": "1"}
"""This folder is not on the worker's path: its ``vllm.py`` is not vLLM."""
PLAIN, PACKED, LLAMA = "plain", "packed", "llama.cpp"
DIVERGENCE = "divergence"
PASSAGE, HEAD, QUESTION = 160, 16, 24
"""Tokens of the parts of a prompt."""
SPARE = 256
"""Rows of the context that are left for answers."""


def text() -> str:
    """English prose and code, the same for everybody."""
    return "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))


class Worker:
    """A contender in a process of its own, stopped while it is not asked."""

    def __init__(self, name: str, python: str, given: dict[str, Any]) -> None:
        self.name = name
        given = {**given, "form": name, "started": time.time()}
        environment = {**SAFE, "OMP_NUM_THREADS": str(given["threads"])}
        self._process = subprocess.Popen(
            [python, str(WORKER), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if name == LLAMA else None,
            text=True,
            env=environment,
        )
        self._write(given)
        self.ready = self._read()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, what: str, **asked: Any) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        self._write({what: asked})
        found = self._read()
        self._process.send_signal(signal.SIGSTOP)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _write(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line) + "\n")
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(name: str, python: str, given: dict[str, Any]) -> Iterator[Worker]:
    worker = Worker(name, python, given)
    try:
        yield worker
    finally:
        worker.close()


@dataclass(frozen=True)
class Prompts:
    """Prompts of passages between a head and a question, from the tokens of a text."""

    ids: Sequence[int]

    def reading(self, rows: int, number: int) -> list[int]:
        """``rows`` tokens that begin otherwise for each ``number``, so that nothing is reused."""
        return [self.ids[number], rows % 97, *self.ids[2:rows]]

    def known(self, rows: int, number: int, question: int) -> list[int]:
        """The same passages with one question or another."""
        return self.reading(rows - QUESTION, number) + self._question(question)

    def moved(self, rows: int, number: int, question: int, of: int) -> list[int]:
        """``rows`` tokens of the passages of :meth:`known`, the last one first."""
        known = self.reading(of - QUESTION, number)
        starts = range(HEAD, HEAD + rows - HEAD - QUESTION, PASSAGE)
        passages = [known[start : start + PASSAGE] for start in starts]
        ids = known[:HEAD] + [token for passage in reversed(passages) for token in passage]
        return ids[: rows - QUESTION] + self._question(question)

    def short(self, number: int) -> list[int]:
        start = 37 * (number + 1)
        return list(self.ids[start : start + 32])

    def _question(self, number: int) -> list[int]:
        return list(self.ids[-(number + 1) * QUESTION :][:QUESTION])


def forget_files(paths: Sequence[Path]) -> None:
    """Takes files out of the system's file cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_llama(options: argparse.Namespace) -> str | None:
    """A Python that has llama.cpp."""
    from kvboost.bench.peers.environments import LLAMA_CPP, peer_python, why_missing

    if options.llama_python:
        return str(options.llama_python)
    if importlib.util.find_spec("xllamacpp") is not None:
        return sys.executable
    if reason := why_missing(LLAMA_CPP):
        print(f"llama.cpp: {reason}")
        return None
    return str(peer_python(LLAMA_CPP))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    from kvboost.model.loading.load import load_tokenizer
    from kvboost.model.loading.weights import known_names, models_dir, pull_gguf

    named = options.model in known_names()
    file = pull_gguf(options.model) if named else Path(options.model).resolve()
    model = options.model if named else str(file)
    pythons = {name: sys.executable for name in (PACKED, PLAIN) if name in options.only}
    if LLAMA in options.only and (python := find_llama(options)):
        pythons[LLAMA] = python
    prompts = Prompts(load_tokenizer(model).encode(text()))
    context = max(options.rows) + options.requests * (options.tokens + 64) + SPARE
    given = {"model": model, "gguf": str(file), "threads": options.threads, "context": context}
    given |= {"ids": prompts.short(99), "slots": options.requests}
    found: dict[str, Any] = {
        "file_bytes": file.stat().st_size,
        "threads": options.threads,
        "machine": platform.machine(),
        "load": os.getloadavg()[0],
    }
    files = [file, *((models_dir() / model).glob("*.safetensors") if named else ())]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(started(name, python, given)) for name, python in pythons.items()
        ]
        for worker in workers:
            found[worker.name] = worker.ready
        for name, asked in measure_answers(workers, prompts, options).items():
            found[name] |= asked
    for name, python in pythons.items():
        found[name]["start"] = measure_starts(name, python, given, files, options)
    if options.divergence:
        ids = prompts.ids[: min(options.rows)]
        done = subprocess.run(
            [sys.executable, str(WORKER), DIVERGENCE],
            env=SAFE,
            input=json.dumps({**given, "ids": ids}),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found[DIVERGENCE] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "load_at_end": os.getloadavg()[0]}


def measure_starts(
    name: str, python: str, given: dict[str, Any], files: list[Path], options: argparse.Namespace
) -> dict[str, float]:
    """Medians. The files of weights have been read before, by the process that answered."""
    starts: dict[str, list[float]] = {"warm": [], "warm_cpu": [], "cold": []}
    for _ in range(options.starts):
        with started(name, python, given) as worker:
            starts["warm"].append(worker.ready["start_s"])
            starts["warm_cpu"].append(worker.ready["start_cpu_s"])
    for _ in range(options.starts if options.cold else 0):
        forget_files(files)
        with started(name, python, given) as worker:
            starts["cold"].append(worker.ready["start_s"])
    return {key: statistics.median(values) for key, values in starts.items() if values}


def measure_answers(
    workers: list[Worker], prompts: Prompts, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """By contender and measure: seconds, the processor's seconds and tokens that were reused."""
    longest, steps = max(options.rows), options.tokens - 1
    taken: dict[str, dict[str, list[dict[str, Any]]]] = {worker.name: {} for worker in workers}

    def read(measure: str, ids: list[int], *, moves: bool = False) -> None:
        for worker in workers:
            said = worker.ask("answer", ids=ids, tokens=1, moves=moves)
            one = {"s": said["first_s"], "cpu_s": said["cpu_s"], "reused": said["reused"]}
            taken[worker.name].setdefault(measure, []).append(one)

    def decode(measure: str, what: str, **asked: Any) -> None:
        for worker in workers:
            said = worker.ask(what, **asked, tokens=options.tokens)
            taken[worker.name].setdefault(measure, []).append({"s": said["rest_s"] / steps})

    for number in range(options.rounds):
        for rows in options.rows:
            read(f"read {rows}", prompts.known(rows, number, 0))
        read("warm", prompts.known(longest, number, 1))
        read("repeated", prompts.known(longest, number, 1))
        read("moved", prompts.moved(options.moved, number, 2, longest), moves=True)
        decode("decode 1", "answer", ids=prompts.short(number))
        some = [prompts.short(8 + number * 8 + one) for one in range(options.requests)]
        decode(f"decode {options.requests}", "together", prompts=some)
    return {
        name: {
            measure: {key: statistics.median(one[key] for one in each) for key in each[0]}
            for measure, each in measures.items()
        }
        for name, measures in taken.items()
    }


def show(found: dict[str, Any]) -> None:
    size, names = found["file_bytes"], [name for name in (PACKED, PLAIN, LLAMA) if name in found]
    print(
        f"file {size / 1e6:,.0f} MB, {found['machine']}, {found['threads']} threads, load "
        f"{found['load']:.1f} to {found['load_at_end']:.1f}"
    )
    for name in names:
        print(f"{name:9} [{found[name]['weights']}]")
    print(f"{'':14}" + "".join(f"{name:>20}" for name in names) + "   packed / others")
    rows: list[tuple[str, list[float]]] = [
        (f"start, {key}", [found[name]["start"][key] for name in names])
        for key in found[names[0]]["start"]
    ]
    peaks = [found[name]["peak_bytes"] / size for name in names]
    own = [
        peak - found[name]["before_bytes"] / size for peak, name in zip(peaks, names, strict=True)
    ]
    rows += [("memory / file", peaks), ("  without libs", own)]
    for measure, one in found[names[0]].items():
        if isinstance(one, dict) and "s" in one:
            rows.append((measure, [found[name][measure]["s"] for name in names]))
            if found["threads"] == 1 and "cpu_s" in one:
                rows.append((f"{measure}, cpu", [found[name][measure]["cpu_s"] for name in names]))
    for label, values in rows:
        ratios = [f"{values[0] / other:.2f}" for other in values[1:]]
        print(f"{label:14}" + "".join(f"{value:20.4g}" for value in values), *ratios, sep="   ")
    for measure in ("warm", "repeated", "moved"):
        reused = ", ".join(f"{name} {found[name][measure]['reused']}" for name in names)
        print(f"tokens reused, {measure}: {reused}")
    if DIVERGENCE in found:
        kl = found[DIVERGENCE]
        print(
            f"KL from dequantised weights: mean {kl['mean_kl']:.5f}, median {kl['median_kl']:.5f} "
            f"over {kl['rows']} rows; {kl['same_first_choice']:.1%} have the same likeliest token"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048], help="tokens read")
    parser.add_argument("--moved", type=int, default=1024, help="tokens read in another order")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--requests", type=int, default=8, help="answers at once")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--starts", type=int, default=1, help="starts that are counted")
    parser.add_argument("--no-cold", dest="cold", action="store_false")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="+", default=[PACKED, PLAIN, LLAMA])
    parser.add_argument("--llama-python", help="a Python that has xllamacpp")
    parser.add_argument("--no-divergence", dest="divergence", action="store_false")
    found = measure(parser.parse_args())
    show(found)
    print(json.dumps(found))
