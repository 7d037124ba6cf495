"""Options as keyword arguments, and the errors for names that are none."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from kvboost.config.engine import KVEvents
from kvboost.errors import ConfigError


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig, for type checkers and editors. A test keeps the two alike."""

    chunk_size: int
    state_every: int | None
    max_cache_bytes: int | str
    max_pinned_bytes: int | str | None
    chunking: str
    recompute_strategy: str
    recompute_ratio: float
    kv_cache_bits: int
    gpu_cache_bytes: int | str | None
    disk_cache_dir: str | os.PathLike[str] | None
    disk_cache_bytes: int | str
    remote_cache_url: str | None
    remote_cache_bytes: int | str | None
    cache_secret: str | None
    reuse_moved: str
    heal: str
    max_audit_kl: float | None
    max_running: int
    max_waiting: int
    max_kv_bytes: int | str | None
    far_kv_bytes: int | str
    far_kv_bits: int
    far_kv_dir: str | os.PathLike[str] | None
    max_pause: float
    graphs: str
    kv_events: KVEvents | None
    speculate: str | int
    draft_model: str | os.PathLike[str] | None
    weights: str
    device_memory: int | str | None
    host_memory: int | str | None
    max_images: int
    max_image_bytes: int | str
    max_image_pixels: int


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
    "prefill_chunk_size": "leave it out: long prompts are always read in slices",
    "max_chunks": "leave it out: max_cache_bytes limits the cache",
    "recompute_overlap": "leave it out: recompute_ratio says how much of moved text is recomputed",
    "speculative_config": "use speculate, and draft_model for a model that drafts",
    "tree_speculative_config": "use speculate: drafts are sequences, not trees",
    "streaming_config": "use device_memory, and host_memory for layers from disk",
    "awq_path": "name the quantised folder as the model, with weights='packed'",
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
