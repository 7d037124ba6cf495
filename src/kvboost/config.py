"""The options that users choose and their defaults: frozen, validated once. Only this module reads
environment variables."""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from kvboost.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"

CHUNKING = ("fixed", "semantic", "document")
STRATEGIES = ("auto", "query", "cacheblend", "selective", "random", "none")
WITHOUT_RATIO = ("selective", "none")
"""The strategies that ``recompute_ratio`` says nothing to."""
MOST_RECOMPUTED = 0.5
"""With ``auto``, rounds of repair end when this share of the moved rows has been recomputed."""
KV_BITS = (16, 8, 4)
LEAST_SECRET = 16
"""Characters of a cache secret."""
REUSE_MOVED = ("when_faster", "always")
HEAL = ("auto", "idle", "off")
EXACTNESS = ("repaired", "verified")
GRAPHS = ("auto", "lazy", "off")
DTYPES = ("float32", "bfloat16", "float16")
SPECULATE = ("auto", "off")
WEIGHTS = ("auto", "plain", "packed")
MOST_DRAFTED, LIMIT_DRAFTED = 16, 64
"""Tokens of a draft: the most by default, and the most that may be asked for."""

EnumT = TypeVar("EnumT", bound=Enum)


class GenerationMode(str, Enum):
    """How much of the cache a request may use."""

    BASELINE = "baseline"
    """No reuse: the request reads nothing from the cache and adds nothing to it. A single prompt
    is computed exactly as stock transformers computes it; the other modes use KVBoost's own
    kernels where there are any. On a GPU, tokens after the first come from KVBoost's kernels too,
    and may round differently."""
    PREFIX_CACHE = "prefix_cache"
    """Exact hits only: the answer is the one that the model gives without a cache."""
    CHUNK_KV_REUSE = "chunk_kv_reuse"
    """Exact hits, and text that was cached at another place, which is moved and repaired. This is
    faster, and the answer is close to the one without a cache. Every result says how many rows
    were moved."""


def choose(kind: type[EnumT], value: EnumT | str, option: str) -> EnumT:
    """Returns ``value`` as a member of ``kind``; raises a ConfigError that lists the members."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in kind)
        raise ConfigError(f"{option}={value!r} is unknown; choose one of {allowed}") from None


def one_of(value: str | int, allowed: Sequence[str | int], option: str) -> None:
    """Raises ConfigError unless ``value`` is among ``allowed``."""
    if value not in allowed:
        listing = ", ".join(repr(name) for name in allowed)
        raise ConfigError(f"{option}={value!r} is not available; choose one of {listing}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def at_least(value: float, least: float, option: str) -> None:
    """Raises ConfigError unless ``value`` is a number, and not below ``least``."""
    if not _is_number(value) or value < least:
        raise ConfigError(f"{option}={value!r} must be a number of at least {least}")


def within(value: float, low: float, high: float, option: str) -> None:
    """Raises ConfigError unless ``value`` is a number from ``low`` to ``high``."""
    if not _is_number(value) or not low <= value <= high:
        raise ConfigError(f"{option}={value!r} must be a number between {low} and {high}")


def whole(value: int, least: int, option: str) -> None:
    """Raises ConfigError unless ``value`` is an int, and not below ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}={value!r} must be a whole number of at least {least}")


def most_drafted(speculate: str | int) -> int:
    """The most tokens of a draft that the option ``speculate`` allows. Raises ConfigError if it is
    neither of ``SPECULATE`` nor such a number."""
    if isinstance(speculate, str) and speculate in SPECULATE:
        return MOST_DRAFTED if speculate == "auto" else 0
    if isinstance(speculate, bool) or not isinstance(speculate, int):
        raise ConfigError(
            f"speculate={speculate!r} is not available; choose 'auto', 'off' or the most tokens of "
            f"a draft, 1 to {LIMIT_DRAFTED}"
        )
    within(speculate, 1, LIMIT_DRAFTED, "speculate")
    return speculate


def closest(name: str, known: Collection[str]) -> str | None:
    """The entry of ``known`` that ``name`` is probably a misspelling of; None if none is close."""
    folded = {one.casefold(): one for one in known}
    found = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.7)
    return folded[found[0]] if found else None


def unknown_option(name: str, known: Collection[str]) -> ConfigError:
    """The error for an option that does not exist: a guess at what was meant, and the list."""
    guess = closest(name, known)
    hint = f"did you mean {guess!r}? The options are" if guess else "the options are"
    return ConfigError(f"unknown option {name!r}; {hint} {', '.join(sorted(known))}")


UNITS = {"": 1, "b": 1}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(size: int | str, option: str = "size") -> int:
    """Parses a size as people write it: ``2147483648``, ``"2GiB"``, ``"500 MB"``."""
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
    """A size as people write it: ``"512B"``, ``"1.5MiB"``. ``parse_bytes`` reads it back, rounded
    to the tenth shown."""
    power = next((power for power in range(4) if round(size / 1024**power, 1) < 1024), 4)
    unit = ("B", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{size / 1024**power:.1f}".removesuffix(".0") + unit


@dataclass(frozen=True)
class KVEvents:
    """Where and how to publish KV events, in vLLM's format. They contain the tokens of prompts."""

    endpoint: str
    """A ZeroMQ address: ``tcp://*:5557`` listens; ``tcp://host:5557`` connects to a subscriber that
    listens; ``ipc://path`` stays on this machine."""
    topic: str = ""
    """The first frame of every message; llm-d expects ``kv@ADDRESS@MODEL``."""
    replay_endpoint: str | None = None
    """An address at which subscribers ask for messages that they have missed."""
    block_size: int = 16
    """Tokens in a block; the router must be set to the same number."""

    def __post_init__(self) -> None:
        for option in ("endpoint", "replay_endpoint"):
            address = getattr(self, option)
            if address is not None and not re.fullmatch(
                r"tcp://[^\s/]+:\d{1,5}|(ipc|inproc)://\S+", address
            ):
                raise ConfigError(
                    f"{option}={address!r} is not an address for KV events; write "
                    "tcp://*:5557, tcp://host:5557 or ipc://path"
                )
        whole(self.block_size, 1, "block_size")
        for name in ("zmq", "msgspec"):
            if importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"KV events need {name}; install it with: pip install pyzmq msgspec"
                )


@dataclass(frozen=True)
class EngineConfig:
    """How an engine keeps and reuses KV: every option, its default and its check.

    Sizes may be written as ``"2GiB"`` and are kept in bytes; ``document_markers`` may be a single
    string and is kept as a tuple.
    """

    chunk_size: int = 128
    """Tokens in a chunk, the unit in which KV is kept, found and evicted."""
    max_chunks: int | None = None
    """The most chunks in memory; by default only bytes limit them."""
    max_cache_bytes: int = 2 * 1024**3
    """The cache's budget in memory."""
    max_pinned_bytes: int | None = None
    """The most that pinned texts may take of it; by default half."""
    chunking: str = "fixed"
    """Where chunks end: ``"fixed"`` every ``chunk_size`` tokens, ``"semantic"`` at places that the
    text itself determines, ``"document"`` at ``document_markers``."""
    recompute_strategy: str = "auto"
    """How moved text is repaired: ``"auto"``, ``"query"``, ``"cacheblend"``, ``"selective"``,
    ``"random"`` (a control) or ``"none"``."""
    recompute_ratio: float = 0.15
    """The share of moved rows that is computed again."""
    recompute_tolerance: float | None = None
    """With ``"auto"``: more rows are computed again, up to half of the moved ones, if the first
    token's distribution is expected to be further from a full prefill's than this KL. None: what
    ``calibrate`` has found for this model, or no more than ``recompute_ratio`` says."""
    recompute_overlap: int = 16
    """With ``"selective"``: how many rows are computed again at each end of a moved passage."""
    kv_cache_bits: int = 16
    """The precision in which KV is kept. 16 keeps what the model computed (32 bits if the model
    runs in 32); 8 and 4 need less space and are close to it."""
    key_norms: bool = False
    """Whether eviction also considers the norms of a chunk's keys: keys with small norms receive
    more attention."""
    gpu_cache_bytes: int | None = None
    """The cache's budget in the GPU's own memory; by default a quarter of what is free."""
    disk_cache_dir: str | os.PathLike[str] | None = None
    """A folder in which the cache outlives the process; None keeps nothing on disk."""
    disk_cache_bytes: int = 20 * 1024**3
    """The budget of that folder."""
    remote_cache_url: str | None = None
    """A store that several machines share: ``redis://host``, or what fsspec knows, such as
    ``s3://bucket`` or a shared folder."""
    remote_cache_bytes: int | None = None
    """The budget of that store. Without it, the limit of a Redis or Valkey server applies; other
    stores need one."""
    cache_secret: str | None = field(default=None, repr=False)
    """Signs the chunks in the folder and the remote store, and keys their names: chunks that are
    not signed with it are refused. At least 16 characters; by default ``KVBOOST_CACHE_SECRET``."""
    prefill_slice: int | None = None
    """Long prompts are prefilled this many tokens at a time, so that memory stays bounded; by
    default 2,048 on a CPU and 16,384 on a GPU. Requests of a batch take smaller slices
    (``step_rows``)."""
    document_markers: tuple[str, ...] = ("\n\n",)
    """The strings that end a document, with ``chunking="document"``."""
    reuse_moved: str = "when_faster"
    """``"when_faster"`` computes moved text where reusing it would not save time; ``"always"``
    reuses it all the same."""
    heal: str = "auto"
    """When rows that were computed on moved text are computed again, exactly: ``"idle"`` after the
    answer, while no request runs; ``"off"`` never. ``"auto"`` begins while the request answers
    where its decode steps have time for it, on GPUs, and leaves the rest to idle time."""
    max_audit_kl: float | None = None
    """If the answers over moved text were further than this from exact ones (mean KL of the last
    eight that were healed), ``recompute_ratio`` is doubled. None: it stays as it is."""
    max_running: int = 16
    """How many requests of a batch or server run at once; the others wait."""
    max_waiting: int = 256
    """How many requests may wait; more are refused with QueueFullError."""
    max_kv_bytes: int | None = None
    """The budget for the KV of all running requests; by default a quarter of the memory."""
    far_kv_bytes: int = 0
    """The budget for KV outside of ``max_kv_bytes``: a request that does not fit there has its
    first rows in the host's memory, if the model is on a GPU, or in a file, if it is on a CPU. 0
    refuses such requests."""
    far_kv_bits: int = 16
    """The precision of these rows. 8 and 4, for models on GPUs, take less memory and time; answers
    are then close to those with 16, and what such requests compute is not kept in the cache."""
    far_kv_dir: str | os.PathLike[str] | None = None
    """The folder of these files; by default that of the system's temporary files."""
    sharing_wait: float = 2.0
    """If a running request is reading text that a new request shares, the new one waits up to this
    many seconds, and the text is read once. 0 disables the waiting."""
    graphs: str = "auto"
    """On a GPU, decode steps and short forwards are recorded as CUDA graphs where the model allows
    it, which takes up to a twentieth of the GPU's memory: with ``"auto"`` the usual ones when
    ``from_pretrained`` loads a model, with ``"lazy"`` all when they are first needed. ``"off"``
    records none."""
    step_rows: int | None = None
    """While some requests are answering, at most this many tokens of other prompts are read per
    step. Fewer keep the answers' pace, more read prompts faster; by default 256 on a CPU and 2,048
    on a GPU. While no request is answering, it is four times as many."""
    kv_events: KVEvents | None = None
    """Where to publish which text the cache holds, for routers; by default nowhere."""
    speculate: str | int = "auto"
    """``"auto"`` drafts the next tokens from the text that was read and checks them in one forward,
    where that is expected to be faster; a number is the most tokens of a draft, by default 16;
    ``"off"`` drafts nothing. Answers are the same. On GPUs, ``"auto"`` drafts nothing as yet."""
    draft_model: str | os.PathLike[str] | None = None
    """A smaller model with the same vocabulary that drafts tokens too; by default none."""
    weights: str = "auto"
    """What ``from_pretrained`` does with quantised weights. ``"packed"`` keeps the codes of 4 and 8
    bits and multiplies with them; ``"plain"`` expands them to the engine's dtype. ``"auto"`` packs
    GGUF files and AWQ, GPTQ and compressed-tensors folders where there are kernels for it, and
    takes the embedded models in ordinary numbers."""
    device_memory: int | None = None
    """What an engine may take of a GPU's memory: for weights, the KV of running requests,
    ``gpu_cache_bytes`` (by default 0 then) and the rows of a forward. Decoder layers that do not
    fit are streamed to the GPU in every forward. None: no limit, and nothing is streamed. A draft
    model comes on top."""
    host_memory: int | None = None
    """What streamed layers may take of the machine's memory; others are read from disk in every
    forward. By default four fifths of what is free."""

    @property
    def repair(self) -> RepairParams:
        return RepairParams(
            self.recompute_strategy,
            self.recompute_ratio,
            self.recompute_overlap,
            self.reuse_moved,
            self.recompute_tolerance,
        )

    def __post_init__(self) -> None:
        self._normalise()
        whole(self.chunk_size, 8, "chunk_size")
        if self.max_chunks is not None:
            whole(self.max_chunks, 1, "max_chunks")
        one_of(self.chunking, CHUNKING, "chunking")
        _ = self.repair  # validates its part
        one_of(self.heal, HEAL, "heal")
        self._check_audit()
        one_of(self.kv_cache_bits, KV_BITS, "kv_cache_bits")
        one_of(self.far_kv_bits, KV_BITS, "far_kv_bits")
        if not isinstance(self.key_norms, bool):
            raise ConfigError(f"key_norms={self.key_norms!r} must be True or False")
        if self.cache_secret is None:
            object.__setattr__(self, "cache_secret", chosen_cache_secret())
        if self.cache_secret is not None and len(self.cache_secret) < LEAST_SECRET:
            raise ConfigError(
                f"cache_secret (or KVBOOST_CACHE_SECRET) has {len(self.cache_secret)} characters; "
                f"at least {LEAST_SECRET} are needed: take `openssl rand -hex 32`"
            )
        if self.disk_cache_dir is not None and not os.fspath(self.disk_cache_dir):
            raise ConfigError("disk_cache_dir='' must name a folder; None keeps nothing on disk")
        if self.host_memory is not None and self.device_memory is None:
            raise ConfigError(
                "host_memory is for layers that do not fit into device_memory; set that too"
            )
        one_of(self.graphs, GRAPHS, "graphs")
        one_of(self.weights, WEIGHTS, "weights")
        most_drafted(self.speculate)
        whole(self.max_running, 1, "max_running")
        whole(self.max_waiting, 0, "max_waiting")
        at_least(self.sharing_wait, 0.0, "sharing_wait")
        if self.kv_events is not None and not isinstance(self.kv_events, KVEvents):
            raise ConfigError(
                f"kv_events={self.kv_events!r} must be KVEvents, such as KVEvents('tcp://*:5557')"
            )
        for option in ("prefill_slice", "step_rows"):
            if (rows := getattr(self, option)) is not None:
                whole(rows, 1, option)
        if not self.document_markers or not all(
            isinstance(marker, str) and marker.strip(" ") for marker in self.document_markers
        ):
            raise ConfigError(
                f"document_markers={self.document_markers!r} must hold strings that are not blank"
            )

    def _check_audit(self) -> None:
        if self.max_audit_kl is None:
            return
        at_least(self.max_audit_kl, 0.0, "max_audit_kl")
        if self.heal == "off":
            raise ConfigError("max_audit_kl needs healing, which measures answers; heal is 'off'")
        if self.recompute_strategy in WITHOUT_RATIO:
            raise ConfigError(
                f"max_audit_kl raises recompute_ratio, and recompute_strategy="
                f"{self.recompute_strategy!r} has none; use 'auto', 'query' or 'cacheblend'"
            )

    def _normalise(self) -> None:
        """Sizes become bytes and markers a tuple, whichever way they were written."""
        for option in SIZES:
            size = getattr(self, option)
            if size is not None or getattr(EngineConfig, option) is not None:
                object.__setattr__(self, option, parse_bytes(size, option))
        markers: object = self.document_markers
        if isinstance(markers, str):
            markers = (markers,)
        if not isinstance(markers, Sequence):
            raise ConfigError(f"document_markers={markers!r} must be a string or several strings")
        object.__setattr__(self, "document_markers", tuple(markers))


SIZES = (
    "max_cache_bytes",
    "max_pinned_bytes",
    "gpu_cache_bytes",
    "disk_cache_bytes",
    "remote_cache_bytes",
    "max_kv_bytes",
    "far_kv_bytes",
    "device_memory",
    "host_memory",
)
"""The options of EngineConfig that are sizes."""


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig as keyword arguments, for type checkers and editors. A test keeps
    the two alike."""

    chunk_size: int
    max_chunks: int | None
    max_cache_bytes: int | str
    max_pinned_bytes: int | str | None
    chunking: str
    recompute_strategy: str
    recompute_ratio: float
    recompute_tolerance: float | None
    recompute_overlap: int
    kv_cache_bits: int
    key_norms: bool
    gpu_cache_bytes: int | str | None
    disk_cache_dir: str | os.PathLike[str] | None
    disk_cache_bytes: int | str
    remote_cache_url: str | None
    remote_cache_bytes: int | str | None
    cache_secret: str | None
    prefill_slice: int | None
    document_markers: str | Sequence[str]
    reuse_moved: str
    heal: str
    max_audit_kl: float | None
    max_running: int
    max_waiting: int
    max_kv_bytes: int | str | None
    far_kv_bytes: int | str
    far_kv_bits: int
    far_kv_dir: str | os.PathLike[str] | None
    sharing_wait: float
    graphs: str
    step_rows: int | None
    kv_events: KVEvents | None
    speculate: str | int
    draft_model: str | os.PathLike[str] | None
    weights: str
    device_memory: int | str | None
    host_memory: int | str | None


class HubOptions(TypedDict, total=False):
    """The options of transformers' ``from_pretrained`` that ours takes by name and passes on.
    Others go into ``model_kwargs``."""

    revision: str
    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool
    trust_remote_code: bool
    subfolder: str
    force_download: bool
    proxies: Mapping[str, str] | None
    code_revision: str
    gguf_file: str
    variant: str
    use_safetensors: bool
    quantization_config: Any
    attn_implementation: str
    device_map: Any
    max_memory: Any
    offload_folder: str | os.PathLike[str]
    torch_dtype: Any


class LoadOptions(EngineOptions, HubOptions, total=False):
    """Everything that ``KVBoost.from_pretrained`` takes by name."""


REMOVED = {
    "chunk_boundary_window": "use chunking='semantic', which ends chunks at places in the text",
    "overlap_k": "leave it out: moved text is repaired when it is used; recompute_ratio says how "
    "much of it",
    "sink_tokens": "leave it out: the first tokens of a prompt stay where they are",
    "recency_window_chunks": "leave it out: eviction learns which chunks come back; engine.pin() "
    "keeps a text for good",
    "prefill_chunk_size": "use prefill_slice",
    "audit_fraction": "leave it out: healing compares every answer over moved text with an exact "
    "one; max_audit_kl says what to do about it",
    "speculative_config": "use speculate, and draft_model for a model that drafts",
    "tree_speculative_config": "use speculate: drafts are sequences, not trees",
    "streaming_config": "use device_memory, and host_memory for layers from disk",
}
"""Options of earlier versions that are gone, and what to do instead."""


def refuse_unknown_options(options: Collection[str], *kinds: type) -> None:
    """Raises ConfigError for the first of ``options`` that no TypedDict of ``kinds`` declares. The
    error names what replaced an option of an earlier version, or guesses what was meant."""
    known = {name for kind in kinds for name in kind.__annotations__}
    for name in options:
        if name in known:
            continue
        if name in REMOVED:
            raise ConfigError(f"{name} was removed in 1.0; {REMOVED[name]}")
        raise unknown_option(name, known)


@dataclass(frozen=True)
class RepairParams:
    """How one request repairs the text that it reuses at another place."""

    strategy: str = "auto"
    ratio: float = 0.15
    """The share of moved rows that is computed again."""
    overlap: int = 16
    """With ``selective``: how many rows at each end of a moved passage."""
    reuse_moved: str = "when_faster"
    """Strategy ``auto`` computes moved text where reusing it would not be faster. ``"always"``
    reuses it anyway, so every machine gives the same answer."""
    tolerance: float | None = None
    """With ``auto``: more rows are computed again if the first token's distribution is expected to
    be further from a full prefill's than this KL. None: no more than ``ratio`` says."""

    def __post_init__(self) -> None:
        one_of(self.strategy, STRATEGIES, "recompute_strategy")
        one_of(self.reuse_moved, REUSE_MOVED, "reuse_moved")
        within(self.ratio, 0.0, 1.0, "recompute_ratio")
        whole(self.overlap, 0, "recompute_overlap")
        if self.tolerance is not None:
            at_least(self.tolerance, 0.0, "recompute_tolerance")

    @property
    def takes_rounds(self) -> bool:
        """Whether more rows may be recomputed than ``ratio`` says."""
        return self.tolerance is not None and self.can_take_rounds

    @property
    def can_take_rounds(self) -> bool:
        """Whether a tolerance has an effect."""
        return self.strategy == "auto" and 0 < self.ratio < MOST_RECOMPUTED

    @property
    def name(self) -> str:
        """Requests whose repairs have the same name may continue from each other's rows."""
        return f"{self.strategy} {self.ratio} {self.overlap} {self.tolerance}"


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens. ``None`` takes the value of the model's generation config.

    A request is greedy unless temperature, top_k, top_p or min_p is given; then it samples, unless
    ``do_sample=False`` or ``temperature=0`` says otherwise.
    """

    max_new_tokens: int = 64
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    """Subtracted from the logits of every token that was already generated."""
    frequency_penalty: float | None = None
    """The same, multiplied by how often the token was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    """Whether the text of the answer leaves out special tokens."""

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
        for option in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, option), bool):
                raise ConfigError(f"{option}={value!r} must be True or False")

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random; otherwise the likeliest one is taken."""
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
    """Limits torch to the compiled code of 128 matrix products. Without this it compiles and keeps
    code for every number of rows that a long-running process meets, thousands of them. Call it in
    our own processes only, before torch is imported. Values already in the environment stay."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def native_kernels_allowed() -> bool:
    """Whether KVBoost may compile and use its own kernels; ``KVBOOST_NATIVE=0`` forbids it."""
    return os.environ.get("KVBOOST_NATIVE", "1") != "0"


def deferred_imports_allowed() -> bool:
    """Whether parts of torch and transformers may be imported when they are first called;
    ``KVBOOST_DEFER_IMPORTS=0`` forbids it."""
    return os.environ.get("KVBOOST_DEFER_IMPORTS", "1") != "0"


def progress_allowed() -> bool:
    """Whether long work may show its progress; ``KVBOOST_PROGRESS=0`` forbids it."""
    return os.environ.get("KVBOOST_PROGRESS", "1") != "0"


def home() -> Path:
    """The folder for models: ``KVBOOST_HOME``, or ``kvboost`` in the user's cache folder."""
    if chosen := os.environ.get("KVBOOST_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvboost"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "kvboost"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvboost"


def chosen_cache_dir() -> Path | None:
    """The folder in which commands keep KV if none is given: ``KVBOOST_CACHE_DIR``."""
    chosen = os.environ.get("KVBOOST_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else None


def cache_dir() -> Path:
    """The folder that ``kvboost cache`` opens: the chosen one, or ``kv`` beside the models."""
    return chosen_cache_dir() or home() / "kv"


def chosen_cache_secret() -> str | None:
    """The secret that stored chunks are signed with: ``KVBOOST_CACHE_SECRET``."""
    return os.environ.get("KVBOOST_CACHE_SECRET") or None


def api_keys() -> list[str]:
    """The server's keys in ``KVBOOST_API_KEYS``, separated by commas, each as in a keys file."""
    return os.environ.get("KVBOOST_API_KEYS", "").split(",")
