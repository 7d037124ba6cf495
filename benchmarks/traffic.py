"""Which eviction policy keeps what comes back: traffic replayed without a model.

    python -m benchmarks traffic --trace conversation.jsonl --size 1000 --plot traffic.png

Prompts are paths of blocks, and a block is served only if all before it are. The policies are the
store's own, in a cache that follows the store's rules; what the best possible policy could have
kept, knowing the future, is computed beside them. JSON comes last.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvboost.bench.kit.figures import Figure, draw_lines, save
from kvboost.bench.kit.tables import table
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.eviction.policy import FIFO, LFU, LRU, Entry, EvictionPolicy
from kvboost.errors import ConfigError, KVBoostError
from kvboost.progress import Progress
from kvboost.tokens.hashing import ChunkKey

Prompt = Sequence[int]

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    "FIFO": FIFO,
    "LFU": LFU,
    "LRU": LRU,
    "Foresight": LearnedPolicy,
}
OURS = "Foresight"
OPTIMUM = "optimum"
SHARES = (0.01, 0.03, 0.1, 0.3)
TRACE_SIZES = (1_000, 3_000, 10_000, 30_000)


@dataclass(frozen=True)
class Trace:
    """Requests in the order they came, and the cache sizes, in blocks, to replay them at.

    In ``paths`` a number means a block together with everything before it, and
    ``parents[number]`` the block before (-1: none), so equal blocks after different beginnings are
    different numbers.
    """

    name: str
    paths: tuple[tuple[int, ...], ...]
    parents: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, name: str, prompts: Sequence[Prompt], sizes: Sequence[int] | None = None) -> Trace:
        """``sizes`` are shares of all distinct blocks unless given."""
        numbers: dict[tuple[int, int], int] = {}
        paths = []
        for prompt in prompts:
            path: list[int] = []
            for block in prompt:
                before = path[-1] if path else -1
                path.append(numbers.setdefault((before, block), len(numbers)))
            paths.append(tuple(path))
        sizes = sizes or [max(1, round(share * len(numbers))) for share in SHARES]
        parents = tuple(before for before, _ in numbers)
        return cls(name, tuple(paths), parents, tuple(dict.fromkeys(sizes)))

    @property
    def num_blocks(self) -> int:
        """Blocks asked for, distinct or not."""
        return sum(map(len, self.paths))

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The blocks as a policy is told of them, by their numbers."""
        keys = [ChunkKey(str(number)) for number in range(len(self.parents))]
        return tuple(
            Entry(key, ChunkKey("root") if parent < 0 else keys[parent], nbytes=1, cost=1.0)
            for key, parent in zip(keys, self.parents, strict=True)
        )


@dataclass(frozen=True)
class Row:
    """Share of the blocks asked for that were served, by each policy and at best."""

    traffic: str
    size: int
    hit_rates: dict[str, float]

    @property
    def gap_closed(self) -> float | None:
        """The share of the gap between LRU and the optimum that ours closes; None without a gap."""
        gap = self.hit_rates[OPTIMUM] - self.hit_rates["LRU"]
        return (self.hit_rates[OURS] - self.hit_rates["LRU"]) / gap if gap > 1e-9 else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "gap_closed": self.gap_closed}


def run(
    traces: Sequence[Trace],
    sizes: Sequence[int] | None = None,
    progress: Callable[[], object] = lambda: None,
    *,
    processes: int = 1,
) -> list[Row]:
    """Every policy on every trace, at ``sizes`` or at the trace's own. ``progress`` is called
    after each of ``num_replays`` replays."""
    cells = [(trace, size) for trace in traces for size in sizes or trace.sizes]
    jobs = [(trace, size, name) for trace, size in cells for name in (*POLICIES, OPTIMUM)]
    hits = []
    with _mapper(processes) as mapped:
        for served in mapped(_served, jobs):
            hits.append(served)
            progress()
    by_cell = iter(hits)
    rows = []
    for trace, size in cells:
        total = max(1, trace.num_blocks)
        rates = {name: next(by_cell) / total for name in (*POLICIES, OPTIMUM)}
        rows.append(Row(trace.name, size, rates))
    return rows


@contextmanager
def _mapper(processes: int) -> Iterator[Callable[..., Iterable[int]]]:
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield pool.map


def _served(job: tuple[Trace, int, str]) -> int:
    trace, size, name = job
    return optimum(trace, size) if name == OPTIMUM else replay(trace, POLICIES[name](), size)


def num_replays(traces: Sequence[Trace], sizes: Sequence[int] | None = None) -> int:
    return sum(len(sizes or trace.sizes) for trace in traces) * (len(POLICIES) + 1)


def replay(trace: Trace, policy: EvictionPolicy, size: int) -> int:
    """Blocks served by a cache of ``size`` blocks. As in the store, only blocks without a successor
    are evicted, and never one of the request itself; blocks without room are not kept."""
    entries = trace.entries
    here: set[ChunkKey] = set()
    hits = 0
    for path in trace.paths:
        keys = [entries[number].key for number in path]
        served = next((at for at, key in enumerate(keys) if key not in here), len(path))
        hits += served
        if served:
            policy.touch(keys[:served])
        new = path[served:size]
        missing = len(here) + len(new) - size
        if missing > 0:
            used = frozenset(keys[:served])
            victims = list(islice((key for key in policy if key not in used), missing))
            for key in victims:
                policy.remove(key)
            here.difference_update(victims)
        new = new[: size - len(here)]
        if new:
            here.update(keys[served : served + len(new)])
            policy.add([entries[number] for number in new])
    return hits


def optimum(trace: Trace, size: int) -> int:
    """Blocks that the best possible cache of ``size`` blocks serves: it keeps those that are used
    soonest, and need not keep what it just computed (Belady's rule). A block's next use is never
    before that of the one it follows, so keeping the nearer ones keeps beginnings whole."""
    never = len(trace.paths)
    upcoming: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for time in range(never - 1, -1, -1):
        path = trace.paths[time]
        next_uses.append([upcoming.get(number, never) for number in path])
        upcoming.update(dict.fromkeys(path, time))
    next_uses.reverse()

    here: dict[int, int] = {}
    farthest: list[tuple[int, int, int]] = []
    hits = 0
    for path, uses in zip(trace.paths, next_uses, strict=True):
        hits += next((at for at, number in enumerate(path) if number not in here), len(path))
        for depth, (number, use) in enumerate(zip(path, uses, strict=True)):
            here[number] = use
            heappush(farthest, (-use, -depth, number))
        while len(here) > size:
            use, _, number = heappop(farthest)
            if here.get(number) == -use:
                del here[number]
    return hits


def read_trace(path: str | os.PathLike[str], sizes: Sequence[int] | None = None) -> Trace:
    """A file with a JSON object per line whose ``hash_ids`` name the blocks of a request, in the
    order of the requests: the format of Mooncake's traces. Raises ``ConfigError``."""
    path = Path(path).expanduser()
    expected = 'each line must be such as {"hash_ids": [0, 1, 2]}, with whole numbers'
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={str(path)!r} cannot be read ({error}); {expected}") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            blocks = json.loads(line)["hash_ids"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: no hash_ids; {expected}") from error
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise ConfigError(f"{path}, line {number}: hash_ids are {blocks!r:.60}; {expected}")
        prompts.append(blocks)
    if not any(prompts):
        raise ConfigError(f"{path} has no requests; {expected}")
    trace = Trace.of(path.stem, prompts, sizes or TRACE_SIZES)
    if sizes is None and len(trace.parents) < max(TRACE_SIZES):
        return Trace.of(path.stem, prompts)
    return trace


def made_up(requests: int = 2_000, seed: int = 0) -> list[Trace]:
    """Traffic of three kinds. Questions over documents that are all equally popular, or popular
    by a Zipf law, and conversations that go on after a while."""
    return [
        Trace.of("uniform", list(documents(requests, exponent=0.0, seed=seed))),
        Trace.of("zipf", list(documents(requests, exponent=1.0, seed=seed))),
        Trace.of("temporal", list(conversations(requests, seed=seed))),
    ]


def documents(requests: int, *, exponent: float, seed: int = 0) -> Iterator[Prompt]:
    """A system prompt, a document, and a question that is never asked again. The n-th
    document is asked about in proportion to ``n ** -exponent``."""
    rng = random.Random(seed)
    blocks = _Blocks()
    systems = [blocks.new(rng.randint(1, 6)) for _ in range(4)]
    texts = [rng.choice(systems) + blocks.new(rng.randint(2, 30)) for _ in range(requests // 8)]
    draws = list(accumulate((rank + 1) ** -exponent for rank in range(len(texts))))
    for _ in range(requests):
        text = texts[bisect_left(draws, rng.random() * draws[-1])]
        yield text + blocks.new(rng.randint(1, 3))


def conversations(requests: int, *, seed: int = 0) -> Iterator[Prompt]:
    """Conversations after a few system prompts. With every turn it becomes likelier that another
    follows, mostly after some hundred other requests; the last block of a turn is not full yet,
    so the next turn changes it. Now and then a long text comes once."""
    rng = random.Random(seed)
    blocks = _Blocks()
    systems = [blocks.new(rng.randint(1, 6)) for _ in range(3)]
    waiting: list[tuple[float, int, list[int], int]] = []
    for time in range(requests):
        if time % 100 == 99:
            yield blocks.new(150)
            continue
        if waiting and waiting[0][0] <= time:
            _, _, path, turn = heappop(waiting)
            path = path[:-1] + blocks.new(rng.randint(1, 4))
        else:
            path, turn = rng.choice(systems) + blocks.new(rng.randint(2, 30)), 0
        yield path
        if rng.random() < (turn + 1) / (turn + 3):
            due = time + rng.lognormvariate(math.log(150), 1.0)
            heappush(waiting, (due, time, path, turn + 1))


class _Blocks:
    """Block ids that were not used before."""

    def __init__(self) -> None:
        self._count = 0

    def new(self, count: int) -> list[int]:
        self._count += count
        return list(range(self._count - count, self._count))


def mean_gap_closed(rows: Sequence[Row]) -> dict[str, float]:
    """Over all sizes of each traffic at which there is a gap."""
    gaps: dict[str, list[float]] = {}
    for row in rows:
        if row.gap_closed is not None:
            gaps.setdefault(row.traffic, []).append(row.gap_closed)
    return {traffic: sum(closed) / len(closed) for traffic, closed in gaps.items()}


def traffic_table(rows: Sequence[Row]) -> Table:
    means = mean_gap_closed(rows)
    lines: list[list[str]] = []
    for traffic in dict.fromkeys(row.traffic for row in rows):
        for row in (row for row in rows if row.traffic == traffic):
            rates = (f"{row.hit_rates[name]:.1%}" for name in (*POLICIES, OPTIMUM))
            gap = "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"
            lines.append([traffic, f"{row.size:,}", *rates, gap])
        if traffic in means:
            lines.append([""] * (len(POLICIES) + 3) + [f"mean {means[traffic]:.0%}"])
    return table(
        "blocks served, share of those asked for",
        ("traffic",),
        ("blocks", *POLICIES, OPTIMUM, "gap closed"),
        lines,
    )


def traffic_figure(rows: Sequence[Row], title: str) -> Figure:
    """Hit rate against cache size: a panel per traffic, a line per policy."""
    panels = {
        traffic: {
            name: [(r.size, 100 * r.hit_rates[name]) for r in rows if r.traffic == traffic]
            for name in (*POLICIES, OPTIMUM)
        }
        for traffic in dict.fromkeys(row.traffic for row in rows)
    }
    styles: dict[str, dict[str, Any]] = {OURS: {"linewidth": 2.6}, OPTIMUM: {"linestyle": "--"}}
    labels = {"x": "cache size, blocks", "y": "blocks served, %"}
    return draw_lines(panels, title=title, log_x=True, styles=styles, **labels)


def replay_all(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Also a real trace: JSON lines with hash_ids, the blocks of a prompt."),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache sizes in blocks, for the traces.")
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Of every made-up traffic.")] = 2_000,
    plot: Annotated[Path | None, typer.Option(help="Draw a picture: a .png or .svg file.")] = None,
) -> None:
    """Replay made-up traffic and real traces against every eviction policy and the optimum."""
    try:
        replayed = [*made_up(requests), *(read_trace(path, size) for path in trace or ())]
    except KVBoostError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None
    with (
        Progress("replaying traffic") as progress,
        progress.step("replays", num_replays(replayed)) as step,
    ):
        rows = run(replayed, progress=step.advance, processes=os.cpu_count() or 1)
    Console().print(traffic_table(rows))
    if plot is not None:
        save(traffic_figure(rows, "block hit rate by cache size"), plot)
    closed = mean_gap_closed(rows)
    print(json.dumps({"rows": [row.as_json() for row in rows], "mean_gap_closed": closed}))


def main() -> None:
    app = typer.Typer(add_completion=False)
    app.command()(replay_all)
    app(prog_name=sys.argv[0])
