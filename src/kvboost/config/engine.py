"""The options of an engine."""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import dataclass, field
from functools import cached_property

from kvboost.config.environment import chosen_cache_secret
from kvboost.config.repair import DEFAULT_RATIO, WITHOUT_RATIO, RepairParams
from kvboost.config.request import HEAL, most_drafted
from kvboost.config.validation import at_least, install_extra, one_of, parse_bytes, whole
from kvboost.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
CHUNKING = ("fixed", "semantic", "document")
KV_BITS = (16, 8, 4)
LEAST_SECRET = 16
"""Characters of a cache secret."""
GRAPHS = ("auto", "off")
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = ("auto", "plain", "packed")


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
                raise ConfigError(f"KV events need {name}; {install_extra('events')}")


@dataclass(frozen=True)
class ImageLimits:
    """The limits of the images of a prompt."""

    max_images: int = 32
    max_bytes: int = 20 * 1024**2
    """Of the file of one image."""
    max_pixels: int = 24_000_000
    """Of one image, before it is scaled down."""


@dataclass(frozen=True)
class EngineConfig:
    """How an engine keeps and reuses KV: every option, its default and its check.

    Sizes may be written as ``"2GiB"`` and are kept in bytes.
    """

    chunk_size: int = 128
    """Tokens in a chunk, the unit in which KV is kept, found and evicted. ``from_pretrained`` sets
    512 for a model on a GPU, unless it is told otherwise."""
    state_every: int | None = None
    """Of a model with states (linear attention, state-space layers, short convolutions): they are
    kept at multiples of so many tokens, and where prompts and answers end. A later prompt can go on
    only where they are kept, and every copy takes memory. By default they take no more memory than
    the KV, and there is one per 1,024 tokens at most. Other models have no states."""
    max_cache_bytes: int = 2 * 1024**3
    """The cache's budget in memory."""
    max_pinned_bytes: int | None = None
    """The most that pinned texts may take of it; by default half."""
    chunking: str = "fixed"
    """Where chunks end: ``"fixed"`` every ``chunk_size`` tokens, ``"semantic"`` at places that the
    text itself determines, ``"document"`` at blank lines."""
    recompute_strategy: str = "auto"
    """How moved text is repaired: ``"auto"``, ``"query"`` or ``"cacheblend"``."""
    recompute_ratio: float = DEFAULT_RATIO
    """The share of moved rows that is computed again; 0 uses them as they are."""
    kv_cache_bits: int = 16
    """The precision in which KV is kept. 16 keeps what the model computed (32 bits if the model
    runs in 32); 8 and 4 need less space and are close to it."""
    gpu_cache_bytes: int | None = None
    """The most of a GPU's memory that the cache may take. Where requests have pages, it takes those
    that none needs, by default all of them; elsewhere memory of its own, by default a quarter of
    what is free."""
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
    """How many requests of a batch or server run at once; the others wait. ``from_pretrained`` sets
    64 for a model on a GPU, unless it is told otherwise."""
    max_waiting: int = 256
    """How many requests may wait; more are refused with QueueFullError."""
    max_kv_bytes: int | None = None
    """The budget for the KV of all running requests; by default a quarter of the machine's memory,
    or half of the memory that is free on a GPU."""
    far_kv_bytes: int = 0
    """The budget for KV outside of ``max_kv_bytes``: a request that does not fit there has its
    first rows in the host's memory, if the model is on a GPU, or in a file, if it is on a CPU. 0
    refuses such requests."""
    far_kv_bits: int = 16
    """The precision of these rows. 8 and 4, for models on GPUs, take less memory and time; answers
    are then close to those with 16, and what such requests compute is not kept in the cache."""
    far_kv_dir: str | os.PathLike[str] | None = None
    """The folder of these files; by default that of the system's temporary files."""
    max_pause: float = 0.2
    """About how many seconds a running answer waits for its next token at most while other prompts
    are read on a CPU: a forward that takes longer lets answers go on between two of its layers. A
    smaller pause makes reading slower. 0 sets no limit."""
    graphs: str = "auto"
    """On a GPU, decode steps and short forwards are recorded as CUDA graphs where the model allows
    it, which takes up to a twentieth of the GPU's memory: the usual ones when ``from_pretrained``
    loads a model, others when they are first needed. ``"off"`` records none."""
    kv_events: KVEvents | None = None
    """Where to publish which text the cache holds, for routers; by default nowhere."""
    speculate: str | int = "auto"
    """``"auto"`` drafts the next tokens from the text that was read and checks them in one forward,
    where that is expected to be faster; a number is the most tokens of a draft, by default 16;
    ``"off"`` drafts nothing. Answers are the same. On GPUs, ``"auto"`` drafts only for a request
    that runs alone."""
    draft_model: str | os.PathLike[str] | None = None
    """A smaller model with the same vocabulary that drafts tokens too; by default none."""
    weights: str = "auto"
    """How ``from_pretrained`` loads quantised weights. ``"packed"`` keeps the codes of 4 and 8 bits
    and multiplies with them; ``"plain"`` expands them to the engine's dtype. ``"auto"`` packs GGUF
    files, AWQ, GPTQ and compressed-tensors folders and experts in MXFP4 where there are kernels for
    it, and takes the embedded models in ordinary numbers."""
    device_memory: int | None = None
    """The memory that an engine may take on a GPU: for weights, the KV of running requests,
    ``gpu_cache_bytes`` (by default 0 then) and the rows of a forward. Decoder layers that do not
    fit are streamed to the GPU in every forward. None: no limit, and nothing is streamed. A draft
    model comes on top."""
    host_memory: int | None = None
    """The memory of the machine that streamed layers may take; the other layers are read from disk
    in every forward. By default four fifths of what is free."""

    max_images: int = ImageLimits.max_images
    """The most images of a prompt."""
    max_image_bytes: int = ImageLimits.max_bytes
    """The largest file of an image."""
    max_image_pixels: int = ImageLimits.max_pixels
    """The most pixels of an image before it is scaled down: that takes ten bytes for each."""

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(self.max_images, self.max_image_bytes, self.max_image_pixels)

    @cached_property
    def repair(self) -> RepairParams:
        return RepairParams(self.recompute_strategy, self.recompute_ratio, self.reuse_moved)

    def __post_init__(self) -> None:
        self._normalise()
        whole(self.chunk_size, 8, "chunk_size")
        if self.state_every is not None:
            whole(self.state_every, 16, "state_every")
        one_of(self.chunking, CHUNKING, "chunking")
        _ = self.repair  # validates its part
        one_of(self.heal, HEAL, "heal")
        self._check_audit()
        one_of(self.kv_cache_bits, KV_BITS, "kv_cache_bits")
        one_of(self.far_kv_bits, KV_BITS, "far_kv_bits")
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
            said = "host_memory is for layers that do not fit into device_memory; set that too"
            raise ConfigError(said)
        one_of(self.graphs, GRAPHS, "graphs")
        one_of(self.weights, WEIGHTS, "weights")
        most_drafted(self.speculate)
        whole(self.max_images, 0, "max_images")
        whole(self.max_image_pixels, 1, "max_image_pixels")
        whole(self.max_running, 1, "max_running")
        whole(self.max_waiting, 0, "max_waiting")
        at_least(self.max_pause, 0.0, "max_pause")
        if self.kv_events is not None and not isinstance(self.kv_events, KVEvents):
            raise ConfigError(
                f"kv_events={self.kv_events!r} must be KVEvents, such as KVEvents('tcp://*:5557')"
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
        """Sizes become bytes, whichever way they were written."""
        for option in SIZES:
            size = getattr(self, option)
            if size is not None or getattr(EngineConfig, option) is not None:
                object.__setattr__(self, option, parse_bytes(size, option))


SIZES = (
    *("max_cache_bytes", "max_pinned_bytes", "gpu_cache_bytes", "disk_cache_bytes"),
    *("remote_cache_bytes", "max_kv_bytes", "far_kv_bytes", "device_memory", "host_memory"),
    "max_image_bytes",
)
"""The options of EngineConfig that are sizes."""
