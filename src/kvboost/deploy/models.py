"""Names of models: read from upstreams' lists, joined for clients, missed in errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown

PATH = "/v1/models"
LISTS = {PATH: ("data", "id"), "/api/tags": ("models", "name")}
"""Paths of lists: where a list has its entries, and an entry its name."""
MAX_LIST = 1024**2
"""Bytes of an upstream's list."""
MAX_SHOWN = 12
"""Names in one message."""
Models = Mapping[str, str]
"""Names, and what an upstream says about each, as JSON."""


def listed(body: bytes, path: str = PATH) -> Models | None:
    """The models in a list of the form that ``path`` has; None if it is not one."""
    place, name = LISTS[path]
    try:
        models: dict[str, str] = {}
        for entry in json.loads(body)[place]:
            models.setdefault(f"{entry[name]}", json.dumps(entry, allow_nan=False))
        return models
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def joined(lists: Iterable[Models], path: str = PATH) -> bytes:
    """One list of all models for ``path``, each as the first list describes it."""
    entries: dict[str, str] = {}
    for models in lists:
        entries = {**entries, **models, **entries}  # in the order of the lists; the first wins
    kind = '"object":"list",' if path == PATH else ""
    return f'{{{kind}"{LISTS[path][0]}":[{",".join(entries.values())}]}}'.encode()


def shown_names(names: Iterable[str]) -> str:
    """Names for a message, the first of them if there are many."""
    told = [name if name.isprintable() and len(name) < 80 else shown(name) for name in names]
    more = f" and {len(told) - MAX_SHOWN} more" if len(told) > MAX_SHOWN else ""
    return (", ".join(told[:MAX_SHOWN]) or "none") + more


def not_served(model: str, lists: Iterable[Models | None]) -> ApiError:
    names = dict.fromkeys(name for models in lists for name in models or ())
    said = f"no server has a model {shown(model)}; there is {shown_names(names)}"
    return ApiError(404, said, "model_not_found", "model")
