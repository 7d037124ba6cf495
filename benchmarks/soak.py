"""Mixed requests over a small cache for minutes, with memory, budgets and answers watched."""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, option
from kvboost.bench.texts.prompts import PATTERNS, fragments
from kvboost.config import EngineConfig
from kvboost.errors import AdapterError, KVBoostError, PinError
from kvboost.model.loading.load import LoadedModel
from kvboost.progress import Progress
from kvboost.results import kl_divergence

CHUNKS = 64
CHECKED = 0.1
"""This share of the requests is also answered by full prefill."""
LEAVES = 0.1
"""This share of the streams is left early."""
STEADY, REPLACED = "steady", "replaced"
"""Two adapters: one stays as it is, and the other is replaced or loaded anew while requests run, so
no answer of it is compared."""
PROJECTIONS = ("q_proj", "v_proj", "qkv_proj", "query_key_value")
"""The layers that adapters change, by the ends of their names."""
MODES = (GenerationMode.PREFIX_CACHE, GenerationMode.CHUNK_KV_REUSE)
MOST_GROWTH = 0.03
"""More growth of memory than this is a problem."""


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"minutes": 1.0}

    minutes: float = option(10.0, "How long requests are sent.", least=0.05)
    users: int = option(1, "Users at once; one user's requests run alone.", least=1)


@dataclass
class Soak:
    """The findings. ``problems`` is empty when all went well."""

    seconds: float = 0.0
    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    checked: int = 0
    levels_mb: list[float] = field(default_factory=list)
    """Memory of the process, and on a GPU also of its tensors there, over time, once a tenth of the
    time (a minute of ten) is over. If memory leaks, it grows to the end."""
    evicted: int = 0
    promoted: int = 0
    demoted: int = 0
    done: dict[str, int] = field(default_factory=dict)
    """How often something else than a request was done, by its name."""
    problems: list[str] = field(default_factory=list)

    @property
    def growth(self) -> float:
        return max(self.levels_mb) / self.levels_mb[0] - 1

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / max(1, self.prompt_tokens)

    def note(self, name: str) -> None:
        self.done[name] = self.done.get(name, 0) + 1

    def count(self, result: GenerationResult) -> None:
        self.requests += 1
        self.prompt_tokens += result.prompt_tokens
        self.reused_tokens += result.cached_tokens


def soak(
    model: LoadedModel,
    seconds: float,
    folder: Path,
    on_seconds: Callable[[float], None] = lambda _: None,
    *,
    users: int = 1,
    least_requests: int = 0,
) -> Soak:
    """Sends requests of all kinds for ``seconds``: chats that grow, documents in new orders, long
    and short prompts, streams that end early, salts, adapters, pins, and adapters that are loaded
    anew, forgetting and clearing between them; at least ``least_requests`` of them. After each,
    ``on_seconds`` is given the time since the last."""
    seen = Soak()
    chunk_bytes = _chunk_bytes(model)
    engine = KVBoost(
        model,
        EngineConfig(
            max_cache_bytes=CHUNKS * chunk_bytes,
            max_pinned_bytes=CHUNKS * chunk_bytes // 4,
            disk_cache_dir=folder,
            disk_cache_bytes=3 * CHUNKS * (chunk_bytes + 16_384),
            reuse_moved="always",
            max_running=max(users, EngineConfig().max_running),
            heal="off",  # it would still hold chunks when the books are checked
        ),
    )
    if engine.device.type == "cuda":  # graphs that are recorded later would look like a leak
        engine.rehearse()
    traffic = _Traffic(engine, _write_adapters(folder, model), seed=0)
    memory: list[float] = []
    start, shown = time.monotonic(), 0.0

    def goes_on() -> bool:
        nonlocal shown
        elapsed = time.monotonic() - start
        if seen.requests:
            _check_budgets(engine, seen)
            if elapsed > seconds / 10:
                memory.append(used_mb(engine.device))
            on_seconds(elapsed - shown)
            shown = elapsed
        return elapsed < seconds or seen.requests < least_requests

    if users == 1:
        while goes_on():
            for result in traffic.next_request(seen):
                seen.count(result)
    else:
        asyncio.run(_serve(traffic, users, seen, goes_on))
    seen.seconds = time.monotonic() - start
    seen.levels_mb = levels(memory)
    if seen.growth > MOST_GROWTH:
        seen.problems.append(
            f"memory grew from {seen.levels_mb[0]:.0f} to {max(seen.levels_mb):.0f} MB "
            f"({seen.growth:.1%}; the limit is {MOST_GROWTH:.0%})"
        )
    for pin in engine.pins():
        engine.drop_pin(pin.name)
    engine.flush()
    seen.problems += engine.check_integrity()
    stats = engine.cache_stats()
    seen.evicted, seen.promoted, seen.demoted = (
        stats[name] for name in ("evicted", "promoted", "demoted")
    )
    if stats["in_use"]:
        seen.problems.append(f"{stats['in_use']} chunks are still in use")
    engine.close()
    return seen


async def _serve(traffic: _Traffic, users: int, seen: Soak, goes_on: Callable[[], bool]) -> None:
    """Every user sends one request after the other."""

    async def user() -> None:
        while goes_on():
            await traffic.send(seen)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(user())


class _Traffic:
    """Requests of all kinds, the same for the same seed."""

    def __init__(self, engine: KVBoost, adapters: Sequence[Path], seed: int) -> None:
        self._engine = engine
        self._random = random.Random(seed)
        self._adapters = adapters
        self._replacing = threading.Lock()
        engine.load_adapter(STEADY, adapters[0])
        engine.load_adapter(REPLACED, adapters[1])
        encode = fragments(engine.encode)
        limit = (engine.context_length or 4096) - 128
        length = min(256, limit // 8)
        text = PATTERNS["code"].shared(encode, 40 * length)
        self._documents = [text[i : i + length] for i in range(0, len(text), length)]
        self._longest = min(limit, 8 * length)
        self._turn = length // 4
        self._chats: list[list[int]] = []

    def next_request(self, seen: Soak) -> Iterator[GenerationResult]:
        """Sends one, or does something else."""
        rng, engine = self._random, self._engine
        if (work := self._other_work(seen)) is not None:
            work()
            return
        prompt, options = self._prompt(), self._options()
        if rng.random() < LEAVES:
            with engine.stream(prompt, 8, **options) as stream:
                next(stream, None)
            yield stream.result
            return
        mode = rng.choice(MODES)
        yield engine.generate(prompt, 4, mode, **options)
        if self._is_compared(mode, options):
            self._compare(prompt, options, seen)

    async def send(self, seen: Soak) -> None:
        """As ``next_request``, beside others."""
        rng, engine = self._random, self._engine
        if (work := self._other_work(seen)) is not None:
            await asyncio.to_thread(work)
            return
        prompt, options, mode = self._prompt(), self._options(), rng.choice(MODES)
        leaves = rng.random() < LEAVES
        tokens = rng.randrange(4, 64)
        try:
            stream = engine.astream(prompt, tokens, mode, **options)
        except AdapterError:  # it is being loaded anew
            assert options["adapter"] == REPLACED
            seen.note("adapter was away")
            return
        async with stream:
            async for _ in stream:
                if leaves:
                    break
        seen.count(stream.result)
        if self._is_compared(mode, options):
            await asyncio.to_thread(self._compare, prompt, options, seen)

    def _other_work(self, seen: Soak) -> Callable[[], object] | None:
        """What is done instead of a request, if anything."""
        rng, engine = self._random, self._engine
        document, salt = rng.choice(self._documents), f"tenant-{rng.randrange(3)}"
        ttl, chosen, place = rng.choice([None, 1.0]), rng.choice(self._adapters), rng.random()
        kinds: list[tuple[float, str, Callable[[], object]]] = [
            (0.020, "forget_salt", lambda: engine.forget_salt(salt)),
            (0.010, "forget", lambda: engine.forget(document)),
            (0.002, "clear", engine.clear),
            (0.020, "pin", lambda: self._pin(document, ttl, seen)),
            (0.010, "unpin", lambda: engine.unpin(document)),
            (0.005, "load_adapter", lambda: self._replace(chosen, in_place=True)),
            (0.002, "unload_adapter", lambda: self._replace(chosen, in_place=False)),
        ]
        for share, name, work in kinds:
            if place < share:
                seen.note(name)
                return work
            place -= share
        return None

    def _pin(self, document: list[int], ttl: float | None, seen: Soak) -> None:
        try:
            self._engine.pin(document, ttl=ttl)
        except PinError:  # the budget is small, so that this happens too
            seen.note("no room to pin")

    def _replace(self, folder: Path, *, in_place: bool) -> None:
        with self._replacing:
            if not in_place:
                self._engine.unload_adapter(REPLACED)
            self._engine.load_adapter(REPLACED, folder, in_place=in_place)

    def _options(self) -> dict[str, Any]:
        rng = self._random
        return {
            "cache_salt": rng.choice(["", "", f"tenant-{rng.randrange(3)}"]),
            "adapter": rng.choice([None] * 6 + [STEADY, REPLACED]),
        }

    def _is_compared(self, mode: GenerationMode, options: dict[str, Any]) -> bool:
        known = mode is GenerationMode.PREFIX_CACHE and options["adapter"] != REPLACED
        return known and self._random.random() < CHECKED

    def _compare(self, prompt: list[int], options: dict[str, Any], seen: Soak) -> None:
        seen.checked += 1
        adapter = options["adapter"]
        full = self._engine.generate(prompt, 4, GenerationMode.BASELINE, adapter=adapter)
        kl, most = _deviation(self._engine, prompt, full.token_ids, options)
        if kl > most:
            seen.problems.append(
                f"request {seen.requests} was answered differently: a KL of {kl:.2g}, at most "
                f"{most:g} is rounding"
            )

    def _prompt(self) -> list[int]:
        rng = self._random
        if self._chats and rng.random() < 0.4:
            chat = rng.choice(self._chats)
            chat += rng.choice(self._documents)[: self._length_of_a_turn()]
            if len(chat) > self._longest:
                self._chats.remove(chat)
            return list(chat[: self._longest])
        picked = rng.sample(self._documents, rng.randrange(1, 6))
        prompt = [token for document in picked for token in document]
        prompt += [rng.randrange(100, 200) for _ in range(self._length_of_a_turn())]
        if len(self._chats) < 8 and rng.random() < 0.3:
            self._chats.append(list(prompt))
        return prompt

    def _length_of_a_turn(self) -> int:
        return self._random.randrange(self._turn // 2, 2 * self._turn)


def _deviation(
    engine: KVBoost, prompt: list[int], answer: list[int], options: dict[str, Any]
) -> tuple[float, float]:
    """The distance of the distributions of an exact hit from those of a full prefill, and how far
    rounding may take them."""
    baseline, adapter = GenerationMode.BASELINE, options["adapter"]
    full = engine.score(prompt, answer, baseline, adapter=adapter).logits
    ours = engine.score(prompt, answer, GenerationMode.PREFIX_CACHE, **options).logits
    rounding = 1e-5 if str(engine.dtype) == "torch.float32" else 0.05
    return float(kl_divergence(full, ours).mean()), rounding


def _write_adapters(folder: Path, model: LoadedModel) -> list[Path]:
    """Two adapters of the query and value projections, in PEFT's files. Both factors are random."""
    linears = {
        name: module
        for name, module in model.forward.model.named_modules()
        if name.endswith(PROJECTIONS) and hasattr(module, "in_features")
    }
    if not linears:
        raise KVBoostError(f"this model has no layers named {' or '.join(PROJECTIONS)} to adapt")
    rank, targets = 4, sorted({name.rpartition(".")[2] for name in linears})
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            f"base_model.model.{name}.lora_{side}.weight": 0.05
            * torch.randn(shape, generator=generator)
            for name, module in linears.items()
            for side, shape in (
                ("A", (rank, module.in_features)),
                ("B", (module.out_features, rank)),
            )
        }
        found.append(folder.with_name(f"{folder.name}-adapter-{seed}"))
        found[-1].mkdir()
        save_file(tensors, found[-1] / "adapter_model.safetensors")
        (found[-1] / "adapter_config.json").write_text(json.dumps(described))
    return found


def _check_budgets(engine: KVBoost, seen: Soak) -> None:
    tiers = engine.cache_stats()["tiers"]
    for name in ("ram", "disk"):
        if tiers[name]["bytes"] > tiers[name]["max_bytes"]:
            seen.problems.append(f"{name} holds {tiers[name]['bytes']} bytes")


def used_mb(device: torch.device) -> float:
    """Resident memory, and what tensors on a GPU take."""
    on_gpu = torch.cuda.memory_allocated(device) / 1e6 if device.type == "cuda" else 0.0
    return resident_mb(os.getpid()) + on_gpu


def resident_mb(pid: int) -> float:
    """Resident memory of a process."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def levels(samples: Sequence[float]) -> list[float]:
    """Levels of memory over time, at most twenty. A level is the median of several ``samples``,
    since requests take memory and give it back."""
    few = -(-len(samples) // 20)
    return [statistics.median(samples[i : i + few]) for i in range(0, len(samples), few)]


def _chunk_bytes(model: LoadedModel) -> int:
    one = model.forward.uniform_shape.allocate(EngineConfig().chunk_size)
    return one.numel() * one.element_size()


def run(settings: Settings, bench: Bench) -> Report:
    loaded = bench.load_model()
    with (
        tempfile.TemporaryDirectory(prefix="kvboost-soak-") as folder,
        Progress(f"requests for {settings.minutes:g} minutes over {CHUNKS} chunks") as progress,
        progress.step("seconds", settings.minutes * 60) as step,
    ):
        seen = soak(
            loaded, settings.minutes * 60, Path(folder, "cache"), step.advance, users=settings.users
        )
    first, most, last = seen.levels_mb[0], max(seen.levels_mb), seen.levels_mb[-1]
    told = (
        f"{seen.requests:,} requests in {seen.seconds / 60:.1f} minutes, {seen.reused_share:.0%} "
        f"of their tokens not read again; {seen.evicted:,} chunks evicted, "
        f"{seen.demoted:,} demoted, {seen.promoted:,} promoted; {seen.checked} answers compared\n"
        f"between them: {', '.join(f'{name} {n}' for name, n in sorted(seen.done.items()))}\n"
        f"memory {first:,.0f} MB after a tenth of the time, at most {most:,.0f} later "
        f"({seen.growth:+.1%}), {last:,.0f} at the end"
    )
    if not seen.problems:
        told += "\nbudgets held, nothing leaked, everything adds up"
    shares = {"growth": seen.growth, "reused_share": seen.reused_share}
    return Report(asdict(seen) | shares, [told], problems=seen.problems)
