"""Where the KV of requests and chunks is, and what runs their rows: chosen once, when an engine is
made. Here requests have buffers; ``runtime/paged_backend.py`` gives them pages."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.mixed import AnyFormat, MixedFormat
from kvboost.cache.quantize import KVFormat, Quantizer
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers, open_tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.model.execution.forward import Forward
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.execution.kv import KVPool, Prefix, RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.execution.mixed_kv import make_pool
from kvboost.model.far.store import FarStore
from kvboost.model.loading.load import LoadedModel
from kvboost.model.native.moved_rows import move_keys
from kvboost.reuse.assemble import Packer, StatePacker
from kvboost.reuse.cost import CostModel
from kvboost.reuse.request import BufferedRows, RequestRows
from kvboost.reuse.rope import AnyRotation, MixedRotation, Rotation
from kvboost.runtime.devices import device_of

if TYPE_CHECKING:
    from kvboost.model.paged.forward import PagedForward

MAX_IDLE = 8
"""KV buffers that are kept for the next requests."""
LEAST_STATE_EVERY = 1024
"""Rows between states that are kept, unless the user wants more: prompts are read in slices that
end where states are kept."""
NEAR_SHARE = 2
"""A request with far rows gets this part of max_kv_bytes: other requests run beside it."""


class Backend:
    """Thread-safe: each part has a lock of its own."""

    ends_forwards = True
    """Whether a forward may be ended between two layers, by a hook that raises."""
    no_adapters: str | None = None
    """Why no adapters can be loaded."""
    no_far: str | None = None
    """Why no request can have far rows."""

    def __init__(self, model: LoadedModel, config: EngineConfig, why_buffers: str = "") -> None:
        """``why_buffers``: why requests have no pages."""
        self.model = model
        self.device = kind = device_of(model.device)
        self.forward: Forward | PagedForward = model.forward
        """Runs segments."""
        self.rotation = rotation_of(model)
        self._config = config
        self._why_buffers = why_buffers
        self.tiers = self._open_tiers()
        self.pool = self._make_pool()
        self.pool.far = self._open_far()
        self.packer = self._make_packer()
        # How many rows of a forward there is memory for; None: for any slice.
        most = None if model.placement is None else model.placement.plan.most_rows
        self.prefill_slice = most or kind.slice_rows
        self.embedded_rows = most or kind.embedded_rows
        # The scheduler takes four times as many.
        self.step_rows = kind.step_rows if most is None else min(kind.step_rows, most // 4)

    @cached_property
    def max_kv_bytes(self) -> int:
        """How many bytes the KV of running requests may take. On a GPU, half of what is free when
        this is first asked for: after the cache has its share, unless they have one together."""
        if self._config.max_kv_bytes is not None:
            return self._config.max_kv_bytes
        usual, placement = self.device.kv_bytes(), self.model.placement
        return usual if placement is None else min(usual, placement.plan.kv_bytes)

    @property
    def kept_bytes(self) -> int:
        """The memory of pages that chunks on the GPU are in; 0 if they are tensors of their own."""
        return 0

    @property
    def shares_rows(self) -> bool:
        """Whether running requests may read each other's rows."""
        return self.model.support.reuse_limit is None and not self.model.forward.states

    @cached_property
    def state_every(self) -> int | None:
        """At multiples of so many rows states are kept; None for a model without states."""
        forward, config = self.model.forward, self._config
        if not forward.states or config.state_every is not None:
            return config.state_every if forward.states else None
        as_large = -(-forward.states.nbytes // forward.shape.row_bytes)
        return -(-max(as_large, LEAST_STATE_EVERY) // config.chunk_size) * config.chunk_size

    @property
    def kv_format(self) -> AnyFormat:
        """The format of chunks in slow tiers."""
        shape, bits = self.model.forward.shape, self._config.kv_cache_bits
        states = self.model.forward.states
        formats = tuple(group_format(group, bits) for group in shape.groups)
        if len(formats) == 1 and not states:
            return formats[0]
        return MixedFormat(formats, states.tensors)

    @property
    def _packs(self) -> bool:
        """Whether stored rows may have fewer than 16 bits."""
        return self._config.kv_cache_bits < 16 and not self.model.forward.keeps_latents

    def serve(self, store: ChunkStore, cost: CostModel) -> None:
        """Is called once, before the first request: with where chunks are, and what forwards
        cost."""

    def rows_of(self, kv: RequestKV) -> RequestRows:
        """The rows of a request, for reuse."""
        return BufferedRows(kv, self.packer, self.rotation)

    def kept_prefix(self, known: KnownRows, most_rows: int) -> Prefix | None:
        """Pages of the cache that hold the beginning of a prompt, at most ``most_rows`` rows."""
        return None

    def record_graphs(self, max_running: int) -> int:
        """Records CUDA graphs that requests need, up to ``max_running`` at once; returns how many
        there are."""
        return 0

    @property
    def lacks_graphs(self) -> bool:
        """Whether requests have needed graphs that are not recorded yet."""
        return False

    def record_missing(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Records them, until ``stop`` says so."""

    def notes(self, *, has_adapters: bool) -> list[str]:
        """Why decoding runs slower on a GPU than it could, and which option has no effect."""
        notes, bits = [], self._config.kv_cache_bits
        forward = self.model.forward
        if self._why_buffers and self.device.gpu is not None:
            notes.append(f"requests have no pages: {self._why_buffers}")
        if forward.states and not forward.shares_steps:
            notes.append(
                "one request after another is answered: the model's states cannot be stacked"
            )
        if bits < 16 and not self._packs:
            told = "has no effect: latents are stored in 16 bits or more"
            notes.append(f"kv_cache_bits={bits} {told}")
        return notes

    def close(self) -> None:
        """Frees the memory of requests and restores the model's own attention."""
        self.pool.clear()
        self.model.forward.remove_adapters()
        self.model.forward.release()

    def _open_tiers(self) -> Tiers:
        locked = None if self.device.gpu is None else host_memory
        return open_tiers(self._config, self.model.device, locked, self.kept_bytes)

    def _make_pool(self) -> KVPool:
        pool = make_pool(self.model.forward.shape, MAX_IDLE)
        if self.state_every is not None:
            pool.count_states(self.model.forward.states.nbytes, self.state_every)
        return pool

    def _make_packer(self) -> Packer:
        packer = Packer(*self._make_quantizers())
        if not self.model.forward.states:
            return packer
        own = self.tiers.ram.own if self.device.is_host else torch.clone
        return StatePacker(packer, own)

    def _make_quantizers(self) -> list[Quantizer]:
        """One for each group of layers that are alike."""
        groups = self.model.forward.shape.groups
        rotations = [None] * len(groups) if self.rotation is None else self.rotation.groups
        bits = [group_format(group, self._config.kv_cache_bits).bits for group in groups]
        return [
            make_quantizer(self.model, rotation, self.tiers.ram, own_bits)
            for rotation, own_bits in zip(rotations, bits, strict=True)
        ]

    @property
    def _near_bytes(self) -> int:
        """Of a request with far rows."""
        return self.max_kv_bytes // NEAR_SHARE if self._config.far_kv_bytes else 0

    def _open_far(self) -> FarStore | None:
        """The far memory; None if there is none. Raises ConfigError if it is asked for and the
        model cannot use it."""
        config, forward, near = self._config, self.model.forward, self._near_bytes
        if not config.far_kv_bytes:
            return None
        refusal = self.no_far or _why_not_far(self.model)
        place = refusal or self.device.far_place(config, forward.uniform_shape, near)
        if isinstance(place, str):
            raise ConfigError(
                f"far_kv_bytes={config.far_kv_bytes:,} cannot be used: {place}; leave it at 0"
            )
        fits = self.max_kv_bytes - (near if self.device.gpu is not None else 0)
        return FarStore(
            forward.uniform_shape,
            place,
            fits_bytes=fits,
            near_bytes=near,
            far_bytes=config.far_kv_bytes,
        )


def _why_not_far(model: LoadedModel) -> str | None:
    if model.forward.keeps_latents:
        return "this model keeps latents, which are small and stay near"
    if not model.forward.is_uniform:
        return "the KV of this model's layers differs"
    if not model.forward.packed:
        return "this model keeps its own attention, which reads all rows from one place"
    if model.support.reuse_limit is not None:
        return (
            "this model's rotation depends on the prompt's length, so it must read a prompt in one "
            "piece"
        )
    if len({weight.device for weight in model.forward.model.parameters()}) > 1:
        return "the model is on several devices"
    return None


def rotation_of(model: LoadedModel) -> AnyRotation | None:
    """How keys rotate to another position; None if the model has no rotary positions."""
    rotation = model.rotation
    if rotation is None:
        return None
    shape, interleaved = model.forward.shape, rotation.interleaved
    of_groups: list[list[torch.Tensor]] = [[] for _ in shape.groups]
    for (group, _), of_layer in zip(shape.places, rotation.frequencies, strict=True):
        of_groups[group].append(of_layer)
    rotations = [
        Rotation(torch.stack(some), interleaved=interleaved, kernel=move_keys) for some in of_groups
    ]
    return rotations[0] if len(rotations) == 1 else MixedRotation(rotations, shape.places)


def group_format(shape: KVShape, bits: int) -> KVFormat:
    """How layers of one shape are stored. Rows that are keys and values in one are not
    quantized."""
    bits = bits if shape.sides == 2 else 16
    sizes = shape.num_layers, shape.num_kv_heads, shape.head_dim
    return KVFormat(*sizes, shape.dtype, bits, shape.sides)


def make_quantizer(
    model: LoadedModel, rotation: Rotation | None, ram: RamTier, bits: int
) -> Quantizer:
    """Where the model runs on the CPU, packed rows are in the memory of ``ram`` at once."""
    own = ram.own if device_of(model.device).is_host else None
    return Quantizer(bits, rotation, own=own)
