"""Reads environment variables. No other module does."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def bound_kernel_caches() -> None:
    """Limits torch to the compiled code of 128 matrix products. Without this it compiles and keeps
    code for every number of rows that a long-running process meets, thousands of them. Call it in
    our own processes only, before torch is imported. Values already in the environment stay."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, "128")


def native_kernels_allowed() -> bool:
    """Whether KVBoost may compile and use its own kernels; ``KVBOOST_NATIVE=0`` forbids it."""
    return os.environ.get("KVBOOST_NATIVE", "1") != "0"


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
