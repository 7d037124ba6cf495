"""Names of models: read from upstreams' lists, joined for clients, missed in errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from kvboost.serve.errors import ApiError
from kvboost.serve.problems import shown

PATH = "/v1/models"
MAX_LIST = 1024**2
"""Bytes of an upstream's list."""
MAX_SHOWN = 12
"""Names in one message."""

Models = Mapping[str, str]
"""Names, and what an upstream says about each, as JSON."""


def listed(body: bytes) -> Models | None:
    """The models in a list of OpenAI's form; None if it is not one."""
    try:
        models: dict[str, str] = {}
        for entry in json.loads(body)["data"]:
            models.setdefault(f"{entry['id']}", json.dumps(entry, allow_nan=False))
        return models
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def joined(lists: Iterable[Models]) -> bytes:
    """One list of all models, each as the first list describes it."""
    entries: dict[str, str] = {}
    for models in lists:
        entries = {**entries, **models, **entries}  # in the order of the lists; the first wins
    return f'{{"object":"list","data":[{",".join(entries.values())}]}}'.encode()


def path_model(path: str) -> str:
    """The model that a path asks about; empty if it asks about none."""
    return path.removeprefix(f"{PATH}/") if path.startswith(f"{PATH}/") else ""


def shown_names(names: Iterable[str]) -> str:
    """Names for a message, the first of them if there are many."""
    told = [name if name.isprintable() and len(name) < 80 else shown(name) for name in names]
    more = f" and {len(told) - MAX_SHOWN} more" if len(told) > MAX_SHOWN else ""
    return (", ".join(told[:MAX_SHOWN]) or "none") + more


def not_served(model: str, lists: Iterable[Models | None]) -> ApiError:
    names = dict.fromkeys(name for models in lists for name in models or ())
    return ApiError(
        404,
        f"no server has a model {shown(model)}; there is {shown_names(names)}",
        code="model_not_found",
        param="model",
    )
