"""What tiers cost: bringing chunks up, packing them, finding them again at a start.

The KV is real: a model reads a text, and what it left in a folder is measured on.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from kvboost import KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import PATTERNS, fragments
from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk, Lineage, Origin
from kvboost.cache.quantize import PLAIN, KVData, Quantizer, plain
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig
from kvboost.model.load import LoadedModel, load
from kvboost.progress import Progress
from kvboost.reuse.rope import Rotation
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import as_token_ids, chain_key, root_key

SCANNED = 10_000


@dataclass(frozen=True)
class Promotion:
    """Bringing all chunks of a text up, against what nobody can do without."""

    tier: str
    nbytes: int
    ours: Sample
    reference: Sample

    @property
    def ratio(self) -> float:
        return self.ours.median_ms / self.reference.median_ms


@dataclass(frozen=True)
class Packed:
    """One precision: how small, how fast (of the bytes before packing), how far off."""

    bits: int
    smaller: float
    pack_gb_s: float
    unpack_gb_s: float
    key_error: float
    value_error: float


def measure_promotion(folder: Path, kv_rows: torch.Tensor, rounds: int) -> Iterator[Promotion]:
    """Of the chunks in ``folder``, the way a request takes: from RAM into its rows, and from disk
    into RAM, each with the search for them. The files are read one after the other, ours a few at
    a time."""
    chunks = _chunks(folder)
    nbytes = sum(chunk.nbytes for chunk in chunks)
    ids = as_token_ids(np.concatenate([chunk.info.token_ids for chunk in chunks]))
    root, origin = chunks[0].info.root, chunks[0].info.origin
    packer = Quantizer(16, None)
    flat = [torch.empty_like(chunk.data.tensors[PLAIN]) for chunk in chunks]

    def bring_up(store: ChunkStore, rows: torch.Tensor | None) -> None:
        with store.lookup(root, ids) as known:
            for hit, data in store.fetch(known.exact):
                if rows is not None:
                    place = rows[:, :, :, hit.start : hit.end]
                    packer.place(data, hit.start, 0, hit.start, place)

    def copy(_: int) -> None:
        for chunk, out in zip(chunks, flat, strict=True):
            out.copy_(chunk.data.tensors[PLAIN])

    opened = [_store(folder, origin)]
    bring_up(opened[0], None)
    timed = interleave(
        {
            "ours": Contender(lambda _: bring_up(opened[0], kv_rows)),
            "reference": Contender(copy),
        },
        rounds,
    )
    yield Promotion("ram", nbytes, timed["ours"], timed["reference"])

    def reopen() -> None:
        opened.pop().close()
        opened.append(_store(folder, origin))

    paths = [folder / chunk.key[:2] / f"{chunk.key}.safetensors" for chunk in chunks]
    reopen()
    timed = interleave(
        {
            "ours": Contender(lambda _: bring_up(opened[0], None), reopen),
            "reference": Contender(lambda _: [path.read_bytes() for path in paths]),
        },
        rounds,
    )
    opened.pop().close()
    yield Promotion("disk", nbytes, timed["ours"], timed["reference"])


def measure_packing(folder: Path, positions: Rotation | None, rounds: int) -> Iterator[Packed]:
    chunks = _chunks(folder)
    nbytes = sum(chunk.nbytes for chunk in chunks)
    kv = torch.cat([chunk.data.tensors[PLAIN] for chunk in chunks], 3)
    ends = [chunk.info.base_position + chunk.info.num_tokens for chunk in chunks]
    rows = [kv[:, :, :, start:end] for start, end in pairwise([0, *ends])]
    for bits in (8, 4):
        packer = Quantizer(bits, positions)
        back = torch.empty_like(kv)

        def pack(_: int = 0, packer: Quantizer = packer) -> list[KVData]:
            return [packer.pack(some, start) for some, start in zip(rows, [0, *ends], strict=False)]

        packed = pack()

        def unpack(
            _: int,
            packer: Quantizer = packer,
            packed: list[KVData] = packed,
            out: torch.Tensor = back,
        ) -> None:
            for data, (start, end) in zip(packed, pairwise([0, *ends]), strict=True):
                packer.place(data, start, 0, start, out[:, :, :, start:end])

        timed = interleave({"pack": Contender(pack), "unpack": Contender(unpack)}, rounds)
        errors = [
            float((made.float() - true.float()).norm() / true.float().norm())
            for made, true in zip(back, kv, strict=True)
        ]
        yield Packed(
            bits,
            nbytes / sum(data.nbytes for data in packed),
            nbytes / timed["pack"].median_ms / 1e6,
            nbytes / timed["unpack"].median_ms / 1e6,
            *errors,
        )


def measure_scan(num_chunks: int, advance: Callable[[int], None] = lambda _: None) -> float:
    """Seconds until a store knows what is in a folder of so many chunks of 128 tokens."""
    with _folder() as folder:
        root = root_key("scan", "")
        draw = np.random.default_rng(0)
        data = plain(torch.zeros(2, 1, 1, 128, 1))
        for number in range(num_chunks):
            ids = as_token_ids(draw.integers(0, 50_000, 128))
            key = chain_key(root, ids)
            origin = Origin("scan")
            described = ChunkInfo(
                key, root, root, root, ids, 0, Lineage.EXACT, 16, data.nbytes, origin
            )
            path = folder / key[:2] / f"{key}.safetensors"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(codec.encode(KVChunk(described, data)))
            if number % 100 == 99:
                advance(100)
        start = time.perf_counter()
        store = _store(folder, Origin("scan"))
        seconds = time.perf_counter() - start
        assert store.stats().chunks == num_chunks
        store.close()
        return seconds


def run_tiers(
    model: str,
    num_tokens: int,
    rounds: int,
    console: Console,
    *,
    scanned: int = SCANNED,
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Promotion, packing and the scan at a start: tables, and what a script wants."""
    loaded = load(model, device=device, dtype=dtype)
    machine = describe(loaded.device, loaded.forward.shape.dtype)
    console.print(machine)
    with _folder() as folder, Progress("measuring, interleaved") as progress:
        _read_text(loaded, folder, num_tokens)
        rows = loaded.forward.shape.allocate(num_tokens)
        with progress.step("bringing chunks up", None):
            promotions = list(measure_promotion(folder, rows, rounds))
        rotation = None
        if loaded.frequencies is not None:
            interleaved = loaded.support.architecture.interleaved
            rotation = Rotation(loaded.frequencies, interleaved=interleaved)
        with progress.step("packing", None):
            packed = list(measure_packing(folder, rotation, rounds))
        with progress.step(f"a folder of {scanned:,} chunks", scanned) as step:
            seconds = measure_scan(scanned, step.advance)
    console.print(promotion_table(promotions))
    console.print(packing_table(packed))
    console.print(f"a start over {scanned:,} chunks on disk: {seconds:.2f} s")
    return {
        "benchmark": "tiers",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "promotion": [{**asdict(one), "ratio": one.ratio} for one in promotions],
        "packing": [asdict(one) for one in packed],
        "scan": {"chunks": scanned, "seconds": seconds},
    }


def promotion_table(promotions: list[Promotion]) -> Table:
    against = {"ram": "a plain copy of the bytes", "disk": "reading the files"}
    table = Table(title="bringing chunks up")
    for heading in ("from", "MB", "ours, ms", "against", "ms", "ratio"):
        table.add_column(heading, justify="left" if heading in ("from", "against") else "right")
    for one in promotions:
        table.add_row(
            one.tier,
            f"{one.nbytes / 1e6:.0f}",
            f"{one.ours.median_ms:.1f}",
            against[one.tier],
            f"{one.reference.median_ms:.1f}",
            f"{one.ratio:.2f}",
        )
    return table


def packing_table(packed: list[Packed]) -> Table:
    table = Table(title="packing (relative errors of keys and values)")
    for heading in ("bits", "smaller", "pack, GB/s", "unpack, GB/s", "keys", "values"):
        table.add_column(heading, justify="right")
    for one in packed:
        table.add_row(
            str(one.bits),
            f"{one.smaller:.2f} ×",
            f"{one.pack_gb_s:.2f}",
            f"{one.unpack_gb_s:.2f}",
            f"{one.key_error:.4f}",
            f"{one.value_error:.4f}",
        )
    return table


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvboost-tiers-") as name:
        yield Path(name)


def _read_text(loaded: LoadedModel, folder: Path, num_tokens: int) -> None:
    with KVBoost(loaded, EngineConfig(disk_cache_dir=folder)) as engine:
        engine.warm(PATTERNS["code"].shared(fragments(engine.encode), num_tokens))


def _store(folder: Path, origin: Origin) -> ChunkStore:
    ram = RamTier(1 << 40)
    return ChunkStore(
        Tiers(ram, disk=DiskTier(folder, 1 << 40, allocate=ram.allocate)),
        cut=lambda ids, _: fixed(len(ids), 128),
        origin=origin,
    )


def _chunks(folder: Path) -> list[KVChunk]:
    chunks = [codec.read_file(path) for path in folder.glob("??/*.safetensors")]
    return sorted(chunks, key=lambda chunk: chunk.info.base_position)
