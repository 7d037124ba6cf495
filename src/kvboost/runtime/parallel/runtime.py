"""An engine's runtime over several ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost.cache.quantize import KVFormat
from kvboost.cache.tiers.open import Tiers
from kvboost.config import EngineConfig
from kvboost.errors import KVBoostError
from kvboost.model.execution.kv import KVPool
from kvboost.model.execution.segment import Segment
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.parallel import PartForward, check_split, load_part, num_kv_heads
from kvboost.reuse.assemble import Packer
from kvboost.runtime.backend import MAX_IDLE, Backend, group_format
from kvboost.runtime.parallel.chunks import RankShards, ShardedKV, ShardedPacker, number_of
from kvboost.runtime.parallel.follower import Follower
from kvboost.runtime.parallel.messages import SegmentMessage
from kvboost.runtime.parallel.ranks import Ranks, open_ranks
from kvboost.runtime.runtime import Runtime


class LeadingForward(PartForward):
    """The forward of rank 0: the other ranks run the same segments over their heads."""

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        self._ranks = ranks
        super().__init__(*args, **kwargs)

    def __call__(self, segments: Sequence[Segment]) -> torch.Tensor:
        with self._ranks.together():
            told = [SegmentMessage.of(segment, number_of(segment.kv)) for segment in segments]
            self._ranks.cast(Follower.run, told)
            logits = super().__call__(segments)
            hooks = [segment.hook for segment in segments if segment.hook is not None]
            own = [hook.observed() for hook in hooks]
            if any(seen is not None for seen in own):
                others = zip(*self._ranks.ask(Follower.observed), strict=True)
                for hook, seen, parts in zip(hooks, own, others, strict=True):
                    if seen is not None:
                        _add_up(seen, parts, averages=hook.averages)
            return logits


@torch.inference_mode()
def _add_up(own: torch.Tensor, others: Sequence[torch.Tensor], *, averages: bool) -> None:
    """Adds what the other ranks have observed to what rank 0 has."""
    for part in others:  # in the order of the ranks, so that the sum is the same every time
        own += part.to(own.device)
    if averages:  # over heads, of which every rank has as many
        own /= len(others) + 1


class ParallelRuntime(Runtime):
    """Rank 0's. Budgets in memory are those of each rank; those of the folder and of the remote
    store, which hold whole chunks, are of all ranks together."""

    def __init__(
        self,
        ranks: Ranks,
        model: LoadedModel,
        config: EngineConfig,
        costs: Path | None = None,
        *,
        owns_ranks: bool = True,
    ) -> None:
        """``owns_ranks``: whether the other ranks end with the engine."""
        self.ranks = ranks
        self._owns_ranks = owns_ranks
        try:
            ranks.cast(Follower.begin_engine, config.kv_cache_bits)
            super().__init__(model, config, costs)
        except BaseException:
            self._end_ranks()
            raise

    @property
    def failure(self) -> KVBoostError | None:
        return self.ranks.failure

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._end_ranks()

    def _end_ranks(self) -> None:
        if self._owns_ranks:
            self.ranks.close()

    def _make_backend(self) -> Backend:
        return ParallelBackend(self.ranks, self.model, self._config)


class ParallelBackend(Backend):
    """Every rank has buffers for its heads."""

    ends_forwards = False  # the other ranks would wait for the rest of it
    no_adapters = "adapters cannot be loaded with tp_size > 1 yet; use tp_size=1"
    no_far = "the model is split over several devices (tp_size > 1)"
    shares_rows = False  # they copy them instead

    def __init__(self, ranks: Ranks, model: LoadedModel, config: EngineConfig) -> None:
        self._ranks = ranks
        self._num_kv_heads = num_kv_heads(model.forward.model.config)
        super().__init__(model, config, "the model is split over several devices")

    @property
    def kv_format(self) -> KVFormat:
        here = group_format(self.model.forward.uniform_shape, self._config.kv_cache_bits)
        return replace(here, num_kv_heads=self._num_kv_heads)

    def _open_tiers(self) -> Tiers:
        tiers = super()._open_tiers()
        here, all_heads = self.model.forward.uniform_shape.num_kv_heads, self._num_kv_heads
        return replace(tiers, shards=RankShards(self._ranks, tiers.ram, here, all_heads))

    def _make_pool(self) -> KVPool:
        make = partial(ShardedKV, self._ranks)
        return KVPool(self.model.forward.uniform_shape, MAX_IDLE, make=make)

    def _make_packer(self) -> Packer:
        return ShardedPacker(self._ranks, *self._make_quantizers())


def start_ranks(
    name: str | os.PathLike[str],
    tp_size: int,
    *,
    strict: bool,
    device: str | torch.device | None,
    **hf_kwargs: Any,
) -> Ranks:
    """The processes for a model, if ``tp_size`` of them can serve it."""
    kind = check_split(name, tp_size, strict=strict, device=device, **hf_kwargs)
    return open_ranks(tp_size, kind)


def load_parallel(
    ranks: Ranks, name: str | os.PathLike[str], options: Mapping[str, Any]
) -> LoadedModel:
    """Loads a model on all ranks, or ends them; ``options`` are those of ``load_part``."""
    try:
        with ranks.together():
            ranks.cast(Follower.load, os.fspath(name), ranks.size, options)
            leading = partial(LeadingForward, ranks)
            return load_part(name, ranks.size, make_forward=leading, **options)
    except BaseException:
        ranks.close()
        raise
