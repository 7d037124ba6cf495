"""What cost grows with: the prompt's length, the chunks in the cache, requests at the same time.

Each series is fitted by a power law, ``cost = factor * size ** exponent``: 1 is proportional, 0
does not grow. An exponent holds for the sizes that were measured, not for larger ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console

from kvboost import GenerationMode, KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.plots import check_plot
from kvboost.bench.record import record
from kvboost.bench.stats import PowerLaw, power_law
from kvboost.bench.study_plots import plot_scaling
from kvboost.bench.study_report import scaling_table
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import PATTERNS, fragments, question
from kvboost.cache.chunk import Origin
from kvboost.cache.quantize import plain
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig, whole
from kvboost.model.load import LoadedModel, load
from kvboost.progress import Progress
from kvboost.reuse.plan import LIVE_TOKENS, make_plan
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, root_key

QUESTION_TOKENS = 32
CHUNK = 128
DOCUMENT_CHUNKS = 16
ROOT = root_key("scaling", "")
PASSING = root_key("scaling", "kept for a moment")
VOCABULARY = 50_000
BATCH_PROMPT = 256
BATCH_ANSWER = 17

LENGTH = "tokens of a prompt"
CHUNKS = "stored chunks"
REQUESTS = "requests at once"


@dataclass
class Series:
    """Milliseconds of one thing at several sizes of another."""

    name: str
    over: str
    sizes: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, size: int, sample: Sample) -> None:
        self.sizes.append(size)
        self.samples.append(sample)

    @property
    def law(self) -> PowerLaw:
        return power_law(self.sizes, [sample.median_ms for sample in self.samples])

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "over": self.over,
            "points": [
                {"size": size, "cost": asdict(sample)}
                for size, sample in zip(self.sizes, self.samples, strict=True)
            ],
            **asdict(self.law),
        }


def measure_lengths(
    engine: KVBoost,
    lengths: Sequence[int],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[Series]:
    """Time to first token without reuse, and with all but the question known."""
    found = [Series("full prefill", LENGTH), Series("exact hit", LENGTH)]
    encode = fragments(engine.encode)
    exact = GenerationMode.PREFIX_CACHE
    for length in lengths:
        shared = PATTERNS["code"].shared(encode, length - QUESTION_TOKENS)
        salt = f"scaling-{length}"
        engine.warm(shared, cache_salt=salt)

        def ask(mode: GenerationMode, known: list[int] = shared, salt: str = salt) -> Contender:
            def run(number: int) -> None:
                prompt = known + question(encode, number, QUESTION_TOKENS)
                engine.generate(prompt, 1, mode, cache_salt=salt)

            return Contender(run)

        contenders = {"full prefill": ask(GenerationMode.BASELINE), "exact hit": ask(exact)}
        times = interleave(contenders, rounds, on_round)
        engine.forget_salt(salt)
        for series in found:
            series.add(length, times[series.name])
    return found


class Shelf:
    """A store whose chunks hold tokens and next to no KV, all of them the same: what is measured is
    finding and entering them."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self._kv = plain(torch.zeros(2, 1, 1, CHUNK, 1, dtype=torch.bfloat16))
        self.store = ChunkStore(
            Tiers(RamTier(1 << 40)),
            cut=lambda ids, _: fixed(len(ids), CHUNK),
            origin=Origin("scaling"),
        )
        self.last = self.document()

    @property
    def num_chunks(self) -> int:
        return int(self.store.stats().chunks)

    def document(self) -> TokenIds:
        return as_token_ids(self._draw.integers(0, VOCABULARY, DOCUMENT_CHUNKS * CHUNK))

    def admit(self, ids: TokenIds, root: ChunkKey = ROOT) -> None:
        self.store.admit(root, ids, lambda *_: self._kv, exact_rows=len(ids))

    def pass_on(self) -> None:
        """Forgets what was admitted for a moment."""
        self.store.forget(PASSING)

    def fill(self, num_chunks: int, on_chunks: Callable[[float], None] = lambda _: None) -> None:
        """Adds documents until there are ``num_chunks``."""
        while (missing := num_chunks - self.num_chunks) > 0:
            for _ in range(-(-missing // DOCUMENT_CHUNKS)):
                self.last = self.document()
                self.admit(self.last)
                on_chunks(DOCUMENT_CHUNKS)

    def plan(self, ids: TokenIds) -> int:
        """Finds and plans a prompt; returns how many of its rows are known."""
        moved_before = len(ids) - LIVE_TOKENS
        with self.store.lookup(ROOT, ids, moved_before=moved_before, pin=False) as known:
            return make_plan(len(ids), known).num_known

    def close(self) -> None:
        self.store.close()


def measure_chunks(
    counts: Sequence[int], rounds: int, on_chunks: Callable[[float], None] = lambda _: None
) -> list[Series]:
    """Planning a prompt of 2,048 tokens (all of it known in place, known at another place, new) and
    keeping a new one, with ever more in the store. What is kept meanwhile is forgotten at once."""
    names = ("plan, exact", "plan, moved", "plan, nothing known", "admit 16 chunks")
    found = {name: Series(name, CHUNKS) for name in names}
    shelf = Shelf()
    try:
        for count in counts:
            shelf.fill(count, on_chunks)
            known = shelf.last
            moved = as_token_ids(np.concatenate([shelf.document()[:77], known[:-77]]))
            assert shelf.plan(known) > 0 and shelf.plan(moved) > 0, "what was kept is found"
            new = [shelf.document() for _ in range(2 * (rounds + 1))]
            first, second = new[: rounds + 1], new[rounds + 1 :]

            def plan_new(number: int, texts: list[TokenIds] = first) -> None:
                shelf.plan(texts[number])

            def admit(number: int, texts: list[TokenIds] = second) -> None:
                shelf.admit(texts[number], PASSING)

            contenders = {
                "plan, exact": Contender(lambda _, ids=known: shelf.plan(ids)),  # type: ignore[misc]
                "plan, moved": Contender(lambda _, ids=moved: shelf.plan(ids)),  # type: ignore[misc]
                "plan, nothing known": Contender(plan_new),
                "admit 16 chunks": Contender(admit, after=shelf.pass_on),
            }
            for name, sample in interleave(contenders, rounds).items():
                found[name].add(count, sample)
    finally:
        shelf.close()
    return list(found.values())


def measure_requests(
    loaded: LoadedModel,
    counts: Sequence[int],
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> list[Series]:
    """Answers to known prompts, all at once; the whole time, and that of one answer."""
    together, each = Series("all answers", REQUESTS), Series("per answer", REQUESTS)
    most = max(counts)
    with KVBoost(loaded, EngineConfig(max_running=most)) as engine:
        text = PATTERNS["code"].shared(fragments(engine.encode), BATCH_PROMPT * most)
        prompts = [text[i * BATCH_PROMPT : (i + 1) * BATCH_PROMPT] for i in range(most)]
        for prompt in prompts:
            engine.warm(prompt)

        def answer(count: int) -> Contender:
            def run(_: int) -> None:
                engine.generate_batch(
                    prompts[:count], BATCH_ANSWER, "prefix_cache", ignore_eos=True, keep=False
                )

            return Contender(run)

        times = interleave({str(count): answer(count) for count in counts}, rounds, on_round)
    for count in counts:
        sample = times[str(count)]
        together.add(count, sample)
        each.add(count, Sample(*(value / count for value in vars(sample).values())))
    return [together, each]


@dataclass(frozen=True)
class Sizes:
    """At which sizes is measured."""

    lengths: Sequence[int] = (256, 512, 1024, 2048, 4096)
    chunks: Sequence[int] = (1_000, 3_000, 10_000, 30_000, 100_000)
    requests: Sequence[int] = (1, 2, 4, 8, 16)
    rounds: int = 5

    def __post_init__(self) -> None:
        limits = {"lengths": 2 * QUESTION_TOKENS, "chunks": DOCUMENT_CHUNKS, "requests": 1}
        for name, least in limits.items():
            for size in getattr(self, name):
                whole(size, least, name)
        whole(self.rounds, 1, "rounds")


def run_scaling(
    model: str,
    sizes: Sizes,
    console: Console,
    *,
    plot: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Every series that has at least two sizes."""
    if plot is not None:
        check_plot(plot)
    loaded = load(model, device=device, dtype=dtype)
    machine = describe(loaded.device, loaded.forward.shape.dtype)
    console.print(machine)
    with Progress("ever larger") as progress:
        series = list(_measure(loaded, sizes, progress))
    console.print(scaling_table(series))
    if plot is not None:
        plot_scaling(series, plot, title=f"{model}: what cost grows with")
        console.print(f"drawn in {plot}", highlight=False)
    return record("scaling", model, machine, series=[one.as_json() for one in series])


def _measure(loaded: LoadedModel, sizes: Sizes, progress: Progress) -> Iterator[Series]:
    rounds = sizes.rounds
    if len(sizes.lengths) > 1:
        total = len(sizes.lengths) * (rounds + 1)
        with progress.step(LENGTH, total) as step, KVBoost(loaded, EngineConfig()) as engine:
            yield from measure_lengths(engine, sizes.lengths, rounds, step.advance)
    if len(sizes.chunks) > 1:
        with progress.step(CHUNKS, max(sizes.chunks)) as step:
            yield from measure_chunks(sizes.chunks, max(rounds, 15), step.advance)
    if len(sizes.requests) > 1:
        with progress.step(REQUESTS, rounds + 1) as step:
            yield from measure_requests(loaded, sizes.requests, rounds, step.advance)
