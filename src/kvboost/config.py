"""What users may choose: frozen, validated once. The environment is read here and nowhere else."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvboost.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"

CHUNKING = ("fixed", "semantic", "document")
STRATEGIES = ("auto", "query", "cacheblend", "selective", "none")
KV_BITS = (16, 8, 4)
LEAST_SECRET = 16
"""Characters of a cache secret."""
REUSE_MOVED = ("when_faster", "always")
DTYPES = ("float32", "bfloat16", "float16")

EnumT = TypeVar("EnumT", bound=Enum)


class GenerationMode(str, Enum):
    """How much of the cache a request may use."""

    BASELINE = "baseline"
    """No reuse: nothing is read from the cache and nothing is kept. A prompt by itself is read as
    stock transformers reads it; the other modes take our kernels where there are any."""
    PREFIX_CACHE = "prefix_cache"
    """Exact hits only: the answer is the one the model gives without a cache."""
    CHUNK_KV_REUSE = "chunk_kv_reuse"
    """Exact hits, and text that was read at another place, moved and repaired: faster, and close
    to the answer without a cache; every result says how much of it was moved."""


def choose(kind: type[EnumT], value: EnumT | str, option: str) -> EnumT:
    """``value`` as a member of ``kind``; raises ConfigError that lists the members."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{option}={value!r} is unknown; choose one of {allowed}") from None


def one_of(value: str | int, allowed: Sequence[str | int], option: str) -> None:
    if value not in allowed:
        listing = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{option}={value!r} is not available; choose one of {listing}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def at_least(value: float, least: float, option: str) -> None:
    if not _is_number(value) or value < least:
        raise ConfigError(f"{option}={value!r} must be a number of at least {least}")


def within(value: float, low: float, high: float, option: str) -> None:
    if not _is_number(value) or not low <= value <= high:
        raise ConfigError(f"{option}={value!r} must be a number between {low} and {high}")


def whole(value: int, least: int, option: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}={value!r} must be a whole number of at least {least}")


UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(size: int | str, option: str = "size") -> int:
    """Bytes from what people write: ``2147483648``, ``"2GiB"``, ``"500 MB"``."""
    if isinstance(size, int) and not isinstance(size, bool):
        whole(size, 0, option)
        return size
    text = size if isinstance(size, str) else ""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(
            f"{option}={size!r} is not a size; write bytes as a number, or with a unit such as "
            "'500MB' or '2GiB'"
        )
    return int(float(match[1]) * UNITS[match[2].lower()])


def format_bytes(size: int) -> str:
    """Bytes as people write them: ``"512B"``, ``"1.5MiB"``. ``parse_bytes`` reads it back, to
    the tenth shown."""
    power = next((power for power in range(4) if round(size / 1024**power, 1) < 1024), 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size / 1024**power:.1f}".removesuffix(".0") + unit


@dataclass(frozen=True)
class EngineConfig:
    """How an engine keeps and reuses KV. Validated on creation."""

    chunk_size: int = 128
    max_chunks: int | None = None
    max_cache_bytes: int = 2 * 1024**3
    chunking: str = "fixed"
    recompute_strategy: str = "auto"
    recompute_ratio: float = 0.15
    recompute_overlap: int = 16
    kv_cache_bits: int = 16
    """As what KV is kept: 16 is what the model computed (of 32-bit models 32); 8 and 4 are close
    to it."""
    key_norms: bool = False
    """Whether eviction also weighs the norm of a chunk's keys: small ones are attended to more."""
    gpu_cache_bytes: int | None = None
    """The budget in the GPU's own memory; by default a quarter of what is free."""
    disk_cache_dir: str | os.PathLike[str] | None = None
    disk_cache_bytes: int = 20 * 1024**3
    remote_cache_url: str | None = None
    """A store shared by machines: ``redis://host``, or what fsspec knows, such as ``s3://bucket``
    or a shared folder."""
    remote_cache_bytes: int | None = None
    """The budget there; without one the store's own limits hold."""
    cache_secret: str | None = field(default=None, repr=False)
    """Signs the chunks in the folder and the remote store, and keys their names: chunks that are
    not signed with it are refused. At least 16 characters; by default ``KVBOOST_CACHE_SECRET``."""
    prefill_slice: int | None = None
    """Long prompts are prefilled this many tokens at a time, so that memory stays bounded; by
    default what suits the device."""
    document_markers: tuple[str, ...] = ("\n\n",)
    """Where documents end, with ``chunking="document"``."""
    reuse_moved: str = "when_faster"
    audit_fraction: float = 0.0
    """This share of the answers over moved text is compared with a full prefill when idle."""
    max_running: int = 16
    """Of a batch: so many requests run at once, the others wait."""
    max_waiting: int = 256
    max_kv_bytes: int | None = None
    """The KV of running requests together; by default a quarter of the memory."""
    sharing_wait: float = 2.0
    """A request that shares unread text with one that is being read waits for it, so many seconds
    at most; what they share is then read once. 0: nobody waits, everybody reads."""
    step_rows: int | None = None
    """While some requests are answering, so many tokens of other prompts are read between two
    tokens of theirs: fewer keep the pace, more read faster. By default what suits the device."""

    @property
    def repair(self) -> RepairParams:
        return RepairParams(
            self.recompute_strategy, self.recompute_ratio, self.recompute_overlap, self.reuse_moved
        )

    def __post_init__(self) -> None:
        whole(self.chunk_size, 8, "chunk_size")
        if self.max_chunks is not None:
            whole(self.max_chunks, 1, "max_chunks")
        whole(self.max_cache_bytes, 0, "max_cache_bytes")
        one_of(self.chunking, CHUNKING, "chunking")
        _ = self.repair  # validates its part
        within(self.audit_fraction, 0.0, 1.0, "audit_fraction")
        one_of(self.kv_cache_bits, KV_BITS, "kv_cache_bits")
        if not isinstance(self.key_norms, bool):
            raise ConfigError(f"key_norms={self.key_norms!r} must be True or False")
        whole(self.disk_cache_bytes, 0, "disk_cache_bytes")
        for option in ("gpu_cache_bytes", "remote_cache_bytes", "max_kv_bytes"):
            if (size := getattr(self, option)) is not None:
                whole(size, 0, option)
        if self.cache_secret is None:
            object.__setattr__(self, "cache_secret", chosen_cache_secret())
        if self.cache_secret is not None and len(self.cache_secret) < LEAST_SECRET:
            raise ConfigError(
                f"cache_secret (or KVBOOST_CACHE_SECRET) has {len(self.cache_secret)} characters; "
                f"at least {LEAST_SECRET} are needed: take `openssl rand -hex 32`"
            )
        if self.disk_cache_dir is not None and not os.fspath(self.disk_cache_dir):
            raise ConfigError("disk_cache_dir='' must name a folder; None keeps nothing on disk")
        whole(self.max_running, 1, "max_running")
        whole(self.max_waiting, 0, "max_waiting")
        at_least(self.sharing_wait, 0.0, "sharing_wait")
        for option in ("prefill_slice", "step_rows"):
            if (rows := getattr(self, option)) is not None:
                whole(rows, 1, option)
        if not self.document_markers or not all(
            isinstance(marker, str) and marker.strip(" ") for marker in self.document_markers
        ):
            raise ConfigError(
                f"document_markers={self.document_markers!r} must hold strings that are not blank"
            )


@dataclass(frozen=True)
class RepairParams:
    """How one request repairs what it reuses from another place."""

    strategy: str = "auto"
    ratio: float = 0.15
    """The share of moved rows that is computed again."""
    overlap: int = 16
    """``selective``: how many rows at each end of a moved run."""
    reuse_moved: str = "when_faster"
    """Strategy ``auto`` computes moved text where reusing it would not be faster; ``"always"``
    spares the computation all the same, and gives the same answer on every machine."""

    def __post_init__(self) -> None:
        one_of(self.strategy, STRATEGIES, "recompute_strategy")
        one_of(self.reuse_moved, REUSE_MOVED, "reuse_moved")
        within(self.ratio, 0.0, 1.0, "recompute_ratio")
        whole(self.overlap, 0, "recompute_overlap")


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens. ``None`` means: as the model's generation config says.

    Without any of temperature, top_k, top_p and min_p a request is greedy; giving one of them
    samples, unless ``do_sample=False`` or ``temperature=0`` says otherwise.
    """

    max_new_tokens: int = 64
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    """Taken from the logits of every token that was generated before."""
    frequency_penalty: float | None = None
    """The same, as often as it was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        whole(self.max_new_tokens, 1, "max_new_tokens")
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise ConfigError(f"do_sample={self.do_sample!r} must be True, False or None")
        if self.temperature is not None:
            at_least(self.temperature, 0.0, "temperature")
        if self.top_k is not None:
            whole(self.top_k, 0, "top_k")
        for option in ("top_p", "min_p"):
            if (share := getattr(self, option)) is not None:
                within(share, 0.0, 1.0, option)
        if self.repetition_penalty is not None:
            at_least(self.repetition_penalty, 0.01, "repetition_penalty")
        for option in ("presence_penalty", "frequency_penalty"):
            if (penalty := getattr(self, option)) is not None:
                within(penalty, -2.0, 2.0, option)
        for token, bias in (self.logit_bias or {}).items():
            whole(token, 0, "logit_bias: a token id")
            within(bias, -100.0, 100.0, f"logit_bias of {token}")
        if self.seed is not None:
            whole(self.seed, 0, "seed")
            within(self.seed, 0, 2**63 - 1, "seed")
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ConfigError(f"stop={self.stop!r} must hold non-empty strings")
        if self.logprobs is not None:
            whole(self.logprobs, 0, "logprobs")
            within(self.logprobs, 0, 20, "logprobs")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos={self.ignore_eos!r} must be True or False")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; otherwise the likeliest one is taken."""
        if self.do_sample is False or self.temperature == 0:
            return False
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return bool(self.do_sample) or any(value is not None for value in given)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The user's ``stop`` as a tuple: one string, several, or none."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence):
        raise ConfigError(f"stop={stop!r} must be a string or several strings")
    return tuple(stop)


def bound_kernel_caches() -> None:
    """Has torch keep the code of 128 matrix products rather than of thousands: it makes new code
    for every number of rows, and a long-running process meets them all. For processes of our own,
    before torch is loaded; what the environment says already stays."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def native_kernels_allowed() -> bool:
    """Whether kernels of ours may be compiled and used: not with ``KVBOOST_NATIVE=0``."""
    return os.environ.get("KVBOOST_NATIVE", "1") != "0"


def home() -> Path:
    """Where models are kept: ``KVBOOST_HOME``, or ``kvboost`` in the user's cache folder."""
    if chosen := os.environ.get("KVBOOST_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvboost"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "kvboost"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvboost"


def chosen_cache_dir() -> Path | None:
    """The folder in which commands keep KV unless told another: ``KVBOOST_CACHE_DIR``."""
    chosen = os.environ.get("KVBOOST_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else None


def cache_dir() -> Path:
    """The folder ``kvboost cache`` looks into: the chosen one, or ``kv`` beside the models."""
    return chosen_cache_dir() or home() / "kv"


def chosen_cache_secret() -> str | None:
    """The secret that stored chunks are signed with: ``KVBOOST_CACHE_SECRET``."""
    return os.environ.get("KVBOOST_CACHE_SECRET") or None


def api_keys() -> list[str]:
    """The server's keys: ``KVBOOST_API_KEYS``, separated by commas, as ``--api-keys`` has them."""
    return os.environ.get("KVBOOST_API_KEYS", "").split(",")
