"""The record of a benchmark as JSON: what was run, when, where, and which code."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvboost.bench.kit.goals import Goal

NOT_A_SETTING = ("model", "device", "dtype")
"""These are told by the model and the machine of a record."""


def record(
    benchmark: str,
    settings: Mapping[str, Any],
    machine: Mapping[str, Any],
    figures: Mapping[str, Any],
    goals: Sequence[Goal] = (),
    problems: Sequence[str] = (),
) -> dict[str, Any]:
    """The JSON document of a run."""
    made = {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **code(),
        "model": settings.get("model"),
        "machine": dict(machine),
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in settings.items()
            if name not in NOT_A_SETTING
        },
        **figures,
    }
    if goals:
        made["goals"] = [asdict(goal) for goal in goals]
    if problems:
        made["problems"] = list(problems)
    return made


def as_json(row: Any, *properties: str) -> dict[str, Any]:
    """The fields of a dataclass and these properties of it."""
    assert is_dataclass(row) and not isinstance(row, type)
    return {**asdict(row), **{name: getattr(row, name) for name in properties}}


def code() -> dict[str, str | None]:
    """Version and commit of the running code; a ``+`` after the commit says that files have
    changed since. No commit outside a checkout."""
    try:
        release = version("kvboost")
    except PackageNotFoundError:  # run from its sources
        release = "unknown"
    commit = _git("rev-parse", "--short", "HEAD")
    if commit and _git("status", "--porcelain", "--untracked-files=no"):
        commit += "+"
    return {"version": release, "commit": commit or None}


def _git(*arguments: str) -> str:
    folder = Path(__file__).parent
    if not any((parent / ".git").exists() for parent in folder.parents[:5]):
        return ""  # installed: a repository around it is not ours
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
