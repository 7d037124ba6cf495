"""What every benchmark's JSON begins with: what was run, when, where, and which code."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def record(
    benchmark: str, model: str | None, machine: Mapping[str, object], **figures: object
) -> dict[str, Any]:
    return {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **code(),
        "model": model,
        "machine": dict(machine),
        **figures,
    }


def code() -> dict[str, str | None]:
    """Version and commit of what is running; a ``+`` behind the commit says that files have
    changed since. No commit where this is no checkout."""
    try:
        release = version("kvboost")
    except PackageNotFoundError:  # run from its sources
        release = "unknown"
    commit = _git("rev-parse", "--short", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "+"
    return {"version": release, "commit": commit or None}


def here() -> dict[str, object]:
    """The machine this runs on, where no model says more."""
    import torch

    from kvboost.bench.machine import describe

    described = describe(torch.device("cpu"), torch.float32)
    return {name: described[name] for name in ("cpu", "cores", "threads", "python")}


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    if not any((parent / ".git").exists() for parent in folder.parents[:4]):
        return ""  # installed: a repository around it would be somebody else's
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
