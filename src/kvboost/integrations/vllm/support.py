"""The reasons why KVBoost does not serve a model in vLLM, as the log gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from kvboost.integrations.vllm.groups import Groups
from kvboost.integrations.vllm.options import Options

if TYPE_CHECKING:
    from kvboost.integrations.vllm.pages import Layer

REUSED = (FullAttentionSpec, SlidingWindowSpec)
"""The kinds of KV whose rows are reused."""


def why_nothing(config: VllmConfig, options: Options, caches: KVCacheConfig) -> str | None:
    """Why not even exact text is reused; None if it is."""
    if config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported yet"
    if config.model_config.use_mla:
        return "MLA is not supported yet"
    if config.parallel_config.tensor_parallel_size > 1 and options.engine.remote_cache_url:
        return (
            "a remote store is not supported with tensor parallelism yet; leave out "
            "remote_cache_url"
        )
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    if any(isinstance(spec, MambaSpec) for spec in specs):
        return (
            "its Mamba layers have states, which are not kept inside vLLM yet; `kvboost serve` "
            "keeps them"
        )
    if len(specs) > 1 and any(type(spec) not in REUSED for spec in specs):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        return (
            f"of {len(specs)} groups of KV ({kinds}) some are neither full attention nor sliding "
            "windows; start vLLM with --disable-hybrid-kv-cache-manager to make one group of them"
        )
    page_sizes = {config.cache_config.block_size, *(spec.block_size for spec in specs)}
    if len(specs) > 1 and len(page_sizes) > 1:
        sizes = ", ".join(map(str, sorted(page_sizes)))
        return (
            f"its groups of KV have pages of different sizes ({sizes} tokens); start vLLM with "
            "--disable-hybrid-kv-cache-manager to make one group of them"
        )
    if config.speculative_config is not None and Groups.of(caches).window is not None:
        return (
            "speculative decoding is not supported where vLLM frees rows that leave a window; "
            "start it with --disable-hybrid-kv-cache-manager"
        )
    return None


def why_not_moved(config: VllmConfig, layers: Sequence[Layer], groups: Groups) -> str | None:
    """Why moved text is not reused with this configuration; None if it may be."""
    if config.speculative_config is not None:
        return "speculative decoding is not supported with it yet"
    if config.parallel_config.data_parallel_size > 1:
        return "data parallelism is not supported with it yet"
    if config.model_config.is_multimodal_model:
        return "models with images or audio are not supported with it yet"
    for layer in layers:
        if getattr(layer.impl, "sliding_window", None) not in (None, (-1, -1), -1):
            return "sliding windows are not supported with it yet"
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            return "ALiBi has no positions that could be moved"
        if getattr(layer.impl, "logits_soft_cap", None):
            return "soft caps of attention are not supported with it yet"
    if not groups.is_one:
        return "several groups of KV are not supported with it yet"
    return None
