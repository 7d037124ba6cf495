"""The hub: whether it answers, asked once and briefly, and a model's files from there.

The hub's own client tries each file six times, which takes half a minute without a network, even if
every file is in its cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants, get_session, snapshot_download

_SECONDS = 4.0
_OPTIONS = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.txt")
"""What a model in transformers' form consists of."""


def why_unreachable() -> str | None:
    """Why the hub does not answer now; None if it does. Any answer counts, a refusal too."""
    try:
        get_session().head(constants.ENDPOINT, timeout=_SECONDS)
    except Exception as error:  # of whichever HTTP library the hub's client uses
        return f"{type(error).__name__}: {error}"
    return None


def downloaded(hub_id: str, options: Mapping[str, Any]) -> Path:
    """The folder with a model's files. Those that are not in the hub's cache are downloaded now.
    ``options``: as for transformers' ``from_pretrained``."""
    chosen = {name: options[name] for name in _OPTIONS if options.get(name) is not None}
    wanted = list(_FILES)
    if subfolder := options.get("subfolder"):
        wanted = [f"{subfolder}/{each}" for each in wanted]
    others = ["*/*"] if not subfolder else [f"{subfolder}/*/*"]  # the same in other forms
    found = snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=others, **chosen)
    return Path(found)
