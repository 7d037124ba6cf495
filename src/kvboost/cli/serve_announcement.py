"""What ``kvboost serve`` says when it is ready."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvboost.cli.common import address, say
from kvboost.config import format_bytes

if TYPE_CHECKING:
    from kvboost.serve.settings import ServerSettings


def announce(engine: Any, settings: ServerSettings, host: str, port: int) -> None:
    """Says what is served, where, and how to try it. Only the address goes to standard output,
    for scripts."""
    from kvboost.serve.server import served_names
    from kvboost.serve.settings import is_loopback

    url = address(host, port, "http" if settings.tls_cert is None else "https")
    name = served_names(engine, settings)[0]
    body = {
        "model": name,
        "messages": [{"role": "user", "content": "What is a lighthouse for?"}],
    }
    key = " -H 'Authorization: Bearer KEY'" if settings.needs_key else ""
    say.print(f"serving {_description(engine, name)}", markup=False)
    print(f"{url}/v1", flush=True)
    for line in (
        "A page at / shows where each prompt's rows come from. To try it:",
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} "
        f"-d '{json.dumps(body)}'",
    ):
        say.print(line, markup=False)
    if (events := engine.config.kv_events) is not None:
        say.print(
            f"publishing KV events at {events.endpoint}: whoever can connect there can read the "
            "tokens of prompts",
            markup=False,
        )
    if not settings.needs_key and not is_loopback(host):
        say.print(
            f"warning: other machines can reach {host}, and the server asks for no key: anyone "
            "there can use the model and see what others have sent. Set --api-keys.",
            style="yellow",
            markup=False,
        )
    if "*" in settings.cors_origins and not settings.needs_key:
        say.print(
            "warning: with --cors-origin '*' and no key, any web page that a browser opens can use "
            "the model and read what others have sent. Name the origins, or set --api-keys.",
            style="yellow",
            markup=False,
        )
    if settings.needs_key and not any(key.is_admin for key in settings.keys):
        say.print(
            "note: no key is marked admin:NAME:KEY, so every key may inspect the cache",
            style="yellow",
            markup=False,
        )


def _description(engine: Any, name: str) -> str:
    """The model and what it runs with: device, dtype, cache budgets, kernels."""
    from kvboost.checks.doctor import examine

    config = engine.config
    dtype = str(engine.dtype).removeprefix("torch.")
    kernels = examine(engine.model_name, engine.device, engine.dtype).facts["kernels"]
    cache = f"{format_bytes(config.max_cache_bytes)} in memory"
    if config.disk_cache_dir is not None:
        cache += f" and {format_bytes(config.disk_cache_bytes)} in {config.disk_cache_dir}"
    if config.remote_cache_url is not None:
        cache += " and a remote store"
    return f"{name} on {engine.device} in {dtype}; cache: {cache}; own kernels: {kernels}"
