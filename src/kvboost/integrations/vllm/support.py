"""The reasons why KVBoost does not serve a model in vLLM, as the log gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
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
        return _why_no_states(config, options, specs)
    if len(specs) > 1 and any(type(spec) not in REUSED for spec in specs):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        return (
            f"of {len(specs)} groups of KV ({kinds}) some are neither full attention nor sliding "
            "windows; start vLLM with --disable-hybrid-kv-cache-manager to make one group of them"
        )
    page_sizes = {config.cache_config.block_size, *(spec.block_size for spec in specs)}
    if len(specs) > 1 and len(page_sizes) > 1:
        sizes = _listed(page_sizes)
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


def _why_no_states(
    config: VllmConfig, options: Options, specs: Sequence[KVCacheSpec]
) -> str | None:
    """The same for a model with states."""
    cache, mode = config.cache_config, getattr(config.cache_config, "mamba_cache_mode", "none")
    if mode == "none":
        return (
            "it has layers with states, and vLLM keeps them only while its own prefix cache is on; "
            "start it with --enable-prefix-caching"
        )
    if mode != "align":
        return (
            f"its states are not reused with --mamba-cache-mode {mode} yet; leave that option out, "
            "and vLLM chooses `align`"
        )
    if getattr(cache, "use_replayssm", False):
        return "its states are not reused with --use-replayssm yet; leave that option out"
    if config.speculative_config is not None:
        return "speculative decoding is not supported for models with states yet"
    if options.engine.remote_cache_url:
        return (
            "a remote store is not supported for models with states yet; leave out "
            "remote_cache_url. A folder (disk_cache_dir) is"
        )
    if kinds := {type(spec).__name__ for spec in specs} - {"FullAttentionSpec", "MambaSpec"}:
        return f"states beside {', '.join(sorted(kinds))} are not supported yet"
    if not any(isinstance(spec, FullAttentionSpec) for spec in specs):
        return "models that keep states only are not supported yet"
    sizes = {spec.block_size for spec in specs}
    unit = getattr(cache, "prefix_match_unit", None)
    if len(sizes) > 1:
        return (
            f"its states and its rows have pages of different sizes ({_listed(sizes)} tokens); "
            "leave out --mamba-block-size"
        )
    if unit not in (None, *sizes):
        return (
            f"parts of pages (--prefix-match-unit {unit}) are not supported for models with states"
        )
    return None


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def why_not_moved(config: VllmConfig, layers: Sequence[Layer], groups: Groups) -> str | None:
    """Why moved text is not reused with this configuration; None if it may be."""
    if config.speculative_config is not None:
        return "speculative decoding is not supported with it yet"
    if config.parallel_config.data_parallel_size > 1:
        return "data parallelism is not supported with it yet"
    if config.model_config.is_multimodal_model:
        return "models with images or audio are not supported with it yet"
    for layer in layers:
        if getattr(layer.impl, "alibi_slopes", None) is not None:
            return "ALiBi has no positions that could be moved"
        if getattr(layer, "kv_sharing_target_layer_name", None) is not None:
            return "layers that read the rows of others are not supported with it yet"
    if len({layer.impl.num_heads for layer in layers}) > 1:
        return "layers with other numbers of heads are not supported with it yet"
    if groups.with_states:
        return "a state is that of all text before it, which no moved text has"
    if groups.window is not None:
        why = "vLLM frees rows that leave a window, and text that moves needs all of them"
        remedy = "; start it with --disable-hybrid-kv-cache-manager, which keeps them"
        return why + (remedy if len(groups.windows) > 1 else "")
    if not groups.is_one:
        return "several groups of KV are not supported with it yet"
    return None
