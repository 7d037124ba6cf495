"""The served models as Ollama's API describes them."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from kvboost.chat.tool_use import ToolUse
from kvboost.errors import PromptError
from kvboost.serve.ollama.writer import timestamp
from kvboost.serve.server import ServerState

LATEST = ":latest"
"""Ollama's clients add this to a name that has no tag."""
_NEVER = timedelta(days=36500)
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def served_name(name: str, names: tuple[str, ...]) -> str:
    """The one of ``names`` that a request means by ``name``; else ``name``."""
    return name if name in names else name.removesuffix(LATEST)


def all_names(server: ServerState) -> tuple[str, ...]:
    names = (*server.names, *server.adapter_names, *server.embedding_names)
    return tuple(dict.fromkeys(names))


def listed(server: ServerState, name: str) -> dict[str, Any]:
    """One entry of ``/api/tags``."""
    shown = name if ":" in name else f"{name}{LATEST}"
    facts = server.facts
    is_plain = facts.get("weights") == "plain"
    return {
        "name": shown,
        "model": shown,
        "modified_at": _started(server),
        "size": _parameters(server) * _ITEM_BYTES.get(facts.get("dtype", ""), 0) * is_plain,
        # Clients show its beginning. It tells models apart by name, not by their weights.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(server),
    }


def running(server: ServerState, name: str) -> dict[str, Any]:
    """One entry of ``/api/ps``. The model stays loaded as long as the server runs."""
    entry = listed(server, name)
    on_gpu = server.facts.get("device") != "cpu"
    return {
        **entry,
        "expires_at": timestamp(datetime.now(UTC) + _NEVER),
        "size_vram": entry["size"] if on_gpu else 0,
        "context_length": _context(server, name) or 0,
    }


def described(server: ServerState, name: str) -> dict[str, Any]:
    """The answer of ``/api/show``. Call it in a thread: it looks through the vocabulary. Raises
    ApiError 404 if there is no such model."""
    name = served_name(name, all_names(server))
    if name not in server.embedding_names:
        server.check_model(name)
    family, context = _family(server), _context(server, name)
    info = {"general.architecture": family, "general.parameter_count": _parameters(server)}
    if context is not None:
        info[f"{family}.context_length"] = context
    return {
        "modified_at": _started(server),
        "details": _details(server),
        "model_info": info,
        "capabilities": _capabilities(server, name),
    }


def _capabilities(server: ServerState, name: str) -> list[str]:
    embeds = ["embedding"] if name in server.embedding_names else []
    if name not in (*server.names, *server.adapter_names):
        return embeds
    thinks = server.engine.answer_parser([], ToolUse()) is not None
    try:
        server.engine.infill([], [])
        fills_in = True
    except PromptError:
        fills_in = False
    more = {"insert": fills_in, "thinking": thinks}
    return ["completion", "tools", *(word for word, can in more.items() if can), *embeds]


def _details(server: ServerState) -> dict[str, Any]:
    facts, family = server.facts, _family(server)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _count(_parameters(server)),
        "quantization_level": facts.get("dtype", "").upper().replace("FLOAT", "F"),
    }


def _family(server: ServerState) -> str:
    architecture: str = server.facts["architecture"]
    return architecture.removesuffix("ForCausalLM").lower()


def _parameters(server: ServerState) -> int:
    return int(server.facts.get("parameters", 0))


def _context(server: ServerState, name: str) -> int | None:
    is_embedder = name not in (*server.names, *server.adapter_names)
    return server.embedder.max_tokens if is_embedder else server.engine.context_length


def _started(server: ServerState) -> str:
    return timestamp(datetime.fromtimestamp(server.started, UTC))


def _count(number: int) -> str:
    """Such as ``134.5M`` or ``1.5B``."""
    return f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M"
