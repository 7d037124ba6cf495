"""A model larger than a GPU's memory, streamed: tokens per second against what the bus allows."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.random_int4 import random_model
from benchmarks.shapes import VOCABULARY, number_tokenizer
from kvboost import KVBoost
from kvboost.bench.kit.benchmark import Bench
from kvboost.bench.kit.machine import memory_fence
from kvboost.bench.texts.edits import edits
from kvboost.config import EngineConfig, format_bytes
from kvboost.errors import KVBoostError
from kvboost.model.loading.load import wrap
from kvboost.model.loading.machine import bus_bandwidth
from kvboost.model.streaming.layers import StreamedLayers
from kvboost.model.streaming.place import Placement, place
from kvboost.model.streaming.plan import DeviceBudget
from kvboost.model.streaming.slots import Copied, CudaSlots

PROMPT = 32
"""Tokens of every prompt: reading it is one pass, as every step is."""
LEAST_STEPS, MOST_STEPS = 6, 48
DRAFT, DRAFTED = 16, "1 request, drafted"
CODE = "1 request, code edited"
WORDS = re.compile(r" ?\w+|\n *|[^\w\s]|\s")
"""Matches about a token of code."""
EDITS = (0, 6)
"""Edits of code: the first one shows the engine what a pass costs."""
REQUEST_ROWS = 256
"""Rows of KV for each request."""
OTHER_BUSES = {"PCIe 4.0 x16": 25e9, "PCIe 4.0 x8": 13e9}
"""Bytes per second that others have: cards, not this machine."""


@dataclass(frozen=True)
class Pace:
    """The cost of some answers."""

    passes: int
    """Through all layers."""
    seconds: float
    copied_bytes: int
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def bytes_per_s(self) -> float:
        return self.copied_bytes / self.seconds

    def __sub__(self, other: Pace) -> Pace:
        """The extra cost of longer answers over shorter ones."""
        return Pace(
            self.passes - other.passes,
            self.seconds - other.seconds,
            self.copied_bytes - other.copied_bytes,
            self.tokens - other.tokens,
        )


def measure(
    shape: str, device_memory: int, requests: tuple[int, ...], seconds: float, bench: Bench
) -> dict[str, Any]:
    """The figures of one shape in one budget."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    started = time.monotonic()

    def say(text: str) -> None:
        bench.say(f"{time.monotonic() - started:6.1f} s  {text}")

    with memory_fence(device, device_memory):
        bus = bus_bandwidth(device, 256 << 20 if device.type == "cuda" else 8 << 20)
        say(f"a plain copy from registered memory: {bus / 1e9:.1f} GB/s")
        with make_engine(shape, device, device_memory, max(requests), say) as engine:
            return _measure(engine, device_memory, bus, requests, seconds, say)


def make_engine(
    shape: str, device: torch.device, device_memory: int, requests: int, say: Callable[[str], None]
) -> KVBoost:
    """An engine over random weights, of 4 bits where there is a GPU."""
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = random_model(shape, dtype, quantized=on_gpu)
    say(f"random weights: {sum(weight.nbytes for weight in _weights(model)) / 1e9:.1f} GB")
    text = model.config.get_text_config()
    row_bytes = 2 * text.num_hidden_layers * text.num_key_value_heads * dtype.itemsize
    row_bytes *= text.hidden_size // text.num_attention_heads
    config = EngineConfig(
        device_memory=device_memory,
        max_kv_bytes=(requests + 1) * REQUEST_ROWS * row_bytes,
        max_running=requests,
        graphs="off",
    )
    budget = DeviceBudget.of(config)
    assert budget is not None

    def move(model: Any) -> Placement:
        return place(model, device, budget, CudaSlots if on_gpu else HostSlots)

    engine = KVBoost(wrap(model, number_tokenizer(), name=shape, own=on_gpu, move=move), config)
    placement = engine.model.placement
    say((placement.note if placement else None) or "all layers fit")
    return engine


class HostSlots:
    """Slots in the machine's own memory, filled at once: they show what streaming does where there
    is no GPU, and save nothing."""

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self.buffers = torch.empty(num_slots, num_bytes, dtype=torch.uint8, device=device)

    def fill(self, slot: int, source: torch.Tensor) -> None:
        self.buffers[slot, : len(source)].copy_(source)

    def copied(self) -> Copied:
        return _DONE

    def wait(self, slot: int) -> None:
        """It is filled already."""

    def release(self, slot: int) -> None:
        """It is free already: what was asked for has been computed."""


class _Done:
    def synchronize(self) -> None:
        """There is nothing to wait for."""


_DONE = _Done()


def _weights(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _measure(
    engine: KVBoost,
    device_memory: int,
    bus: float,
    requests: tuple[int, ...],
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    pass_bytes = _streamed(engine).pass_bytes
    facts = engine.facts()
    found: dict[str, Any] = {
        "layers": facts["layers"],
        "resident": facts["layers"] - facts["streamed_layers"],
        "pass_bytes": pass_bytes,
        "bus_bytes_per_s": bus,
        "limit_tokens_per_s": bus / pass_bytes,
        "device_memory": device_memory,
        "runs": {},
        "problems": [],
        "projections": {name: rate / pass_bytes for name, rate in OTHER_BUSES.items()},
    }

    def note(name: str, run: Callable[[], Pace]) -> None:
        """A part that fails is a problem, and the others still run."""
        try:
            pace = run()
        except (KVBoostError, RuntimeError) as error:
            found["problems"].append(f"{name}: {type(error).__name__}: {error}")
            say(found["problems"][-1])
            return
        share = pace.bytes_per_s / bus
        found["runs"][name] = {
            **asdict(pace),
            "tokens_per_s": pace.tokens_per_s,
            "bytes_per_s": pace.bytes_per_s,
            "share_of_bus": share,
        }
        say(
            f"{name}: {pace.tokens_per_s:.2f} tokens/s, {pace.bytes_per_s / 1e9:.1f} GB/s, "
            f"{share:.0%} of the bus"
        )

    for number in requests:
        note(_name(number), partial(_decode, engine, number, seconds))
    passes = found["runs"].get(_name(requests[0]), {}).get("passes", LEAST_STEPS)
    note(DRAFTED, partial(_drafted, engine, passes))
    note(CODE, partial(_code_edited, engine))
    if engine.device.type == "cuda":
        found["peak_reserved"] = torch.cuda.max_memory_reserved(engine.device)
        say(f"peak of reserved memory: {format_bytes(found['peak_reserved'])}")
    return found


def _name(requests: int) -> str:
    return f"{requests} request{'s' if requests > 1 else ''}"


def _decode(engine: KVBoost, requests: int, seconds: float) -> Pace:
    """Greedy answers to prompts of their own. Reading these, in a pass or two, is not counted."""
    rng = random.Random(requests)
    prompts = [[rng.randrange(256, VOCABULARY) for _ in range(PROMPT)] for _ in range(requests)]

    def run(tokens: int) -> int:
        if requests == 1:
            engine.generate(prompts[0], tokens, "baseline", ignore_eos=True)
        else:
            engine.generate_batch(prompts, tokens, "baseline", ignore_eos=True)
        return tokens * requests

    run(2)  # compiles kernels
    short = _timed(engine, partial(run, 2))
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(2 * seconds / short.seconds)))
    return _timed(engine, partial(run, steps)) - short


def _drafted(engine: KVBoost, steps: int) -> Pace:
    """An answer that the engine has given before, drafted from that: the most that drafts can
    gain."""
    prompt = list(range(1000, 1000 + PROMPT))

    def run(speculate: str | int) -> int:
        length = 2 * steps
        found = engine.generate(
            prompt, length, "prefix_cache", ignore_eos=True, speculate=speculate, keep=True
        )
        return len(found.token_ids)

    run("off")
    run(DRAFT)  # compiles kernels
    return _timed(engine, partial(run, DRAFT))


def _code_edited(engine: KVBoost) -> Pace:
    """A function is given back with one name changed, drafted from the prompt. Weights are random,
    so the answer is the right one, whatever the model computes."""
    model = engine.model.forward.model

    def run(number: int) -> int:
        prompt, answer = words_as_tokens(code_edit(number), 256)
        with scripted(model, prompt + answer):
            found = engine.generate(
                *(prompt, len(answer), "prefix_cache"),
                ignore_eos=True,
                speculate="auto",
                keep=False,
            )
        if found.token_ids != answer:
            raise RuntimeError("a draft has changed the answer")
        return len(answer)

    *before, last = EDITS
    for number in before:
        run(number)
    return _timed(engine, partial(run, last))


def code_edit(number: int) -> list[str]:
    """A question, and the answer as it should be."""
    one = edits()[number]
    question = (
        f"Rename {one.old} to {one.new} in this function and change nothing else. Answer with the "
        f"whole function only.\n\n```python\n{one.code}```"
    )
    return [question, f"```python\n{one.edited}```"]


def words_as_tokens(texts: list[str], first: int) -> list[list[int]]:
    """Texts as numbers, from ``first`` on, one for each word: random weights know no other
    tokens."""
    known: dict[str, int] = {}
    return [
        [first + known.setdefault(word, len(known)) for word in WORDS.findall(text)]
        for text in texts
    ]


@contextmanager
def scripted(model: nn.Module, tokens: Sequence[int]) -> Iterator[None]:
    """The model computes all that it would compute, and then says that the token at each position
    of the only request is followed by the next of ``tokens``, which are the prompt and the
    answer. Drafts of the answer are accepted or refused as if the model had thought of it."""
    script: torch.Tensor | None = None

    def say(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        nonlocal script
        logits, positions = output.logits[0], kwargs["position_ids"].reshape(-1)
        if script is None:
            script = torch.tensor([*tokens, tokens[-1]], device=logits.device)
        wanted = kwargs.get("logits_to_keep", 0)
        positions = positions[wanted if isinstance(wanted, torch.Tensor) else slice(-wanted, None)]
        following = script[(positions + 1).clamp(max=len(script) - 1)]
        logits.zero_().scatter_(1, following[:, None], 1.0)

    handle = model.register_forward_hook(say, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _timed(engine: KVBoost, run: Callable[[], int]) -> Pace:
    """``run`` says how many tokens were generated."""
    streamed = _streamed(engine)
    started, before = time.perf_counter(), streamed.copied_bytes
    tokens = run()
    spent, copied = time.perf_counter() - started, streamed.copied_bytes - before
    return Pace(round(copied / streamed.pass_bytes), spent, copied, tokens)


def _streamed(engine: KVBoost) -> StreamedLayers:
    placement = engine.model.placement
    if placement is None or placement.streamed is None:
        raise KVBoostError("device_memory holds the whole model: nothing is streamed; give less")
    return placement.streamed
