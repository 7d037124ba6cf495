"""``kvboost serve``: a model as a server with OpenAI's API."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kvboost.cli.common import address, errors, expanded, only_local, say
from kvboost.cli.option_files import read_option_file, read_texts
from kvboost.cli.serve_options import ServeOptions, check_config, num_api_workers, reread_settings
from kvboost.cli.serve_signals import signals_while_loading
from kvboost.config import KVEvents, api_keys, bound_kernel_caches, format_bytes, install_extra
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.serve.settings import ApiKey, ServerSettings


@expanded
def serve(context: typer.Context, given: ServeOptions) -> None:
    """Serve a model over OpenAI's, Anthropic's and Ollama's APIs, with a page at / to watch it.

    Ctrl-C or SIGTERM stops it: running answers end and the cache is written. SIGHUP reads --config,
    --api-keys and the TLS files again; the log says what changed and what needs a restart.

    Example: [bold]kvboost serve --cache-dir ./kv --api-keys keys.txt[/bold]
    """
    bound_kernel_caches()
    reloads = bool(given.config or given.keys_file or given.tls_cert)
    with errors(), signals_while_loading(reloads=reloads) as loading:
        check_config(context)
        try:
            from kvboost.serve.process import bind
            from kvboost.serve.process import serve as run
            from kvboost.serve.remote.processes import serve as run_apart
            from kvboost.serve.settings import ServerSettings, is_loopback
        except ModuleNotFoundError as error:
            said = f"kvboost serve needs {error.name}; {install_extra('serve')}"
            raise ConfigError(said) from None

        workers, host = num_api_workers(given.api_workers), given.host
        keys = _keys(given.keys_file, starting=True)
        texts, left_out = read_texts(given.warm or (), ServerSettings.max_document_bytes)
        if left_out:
            say.print(f"not text, so not warmed: {', '.join(left_out)}")
        is_local = is_loopback(host) and not keys
        own = {
            "keys": keys,
            "warm": texts,
            "embedding_model": _embedding_model(given.embedding_model, given.device),
            "allowed_hosts": only_local(given.allow_host or ()) if is_local else (),
        }
        settings = ServerSettings(**given.for_server() | own)
        reread = partial(reread_settings, context, settings, _keys) if reloads else None
        adapters = _adapters(given.lora or [])
        options = given.for_engine() | {"kv_events": _events(settings, given)}
        with bind(host, given.port) as listening, _load(given.model, **options) as engine:
            for name, path in adapters.items():
                engine.load_adapter(name, path)
            on_gpu = engine.device.type == "cuda"
            if on_gpu if given.rehearse is None else given.rehearse:
                say.print("rehearsing requests of many sizes; --no-rehearse leaves it out")
                say.print(f"rehearsed in {engine.rehearse():.0f} s")
            port = listening.getsockname()[1]

            def ready() -> None:
                announce(engine, settings, host, port)
                loading.ended()

            chosen = run_apart if (on_gpu if workers is None else workers) else run
            chosen(engine, settings, listening, ready, reread)
    folder = options["disk_cache_dir"]
    kept = f"; the cache is in {folder}" if folder else ""
    say.print(f"stopped{kept}")


def _adapters(given: list[str]) -> dict[str, str]:
    """The paths of the adapters in ``--lora``, by name."""
    adapters: dict[str, str] = {}
    for one in given:
        name, found, path = one.partition("=")
        if not (name and found and path) or name in adapters:
            raise ConfigError(f"--lora {one}: give NAME=PATH, each name once")
        adapters[name] = path
    return adapters


def _load(model: str, **options: Any) -> Any:
    import kvboost

    say.print(f"loading {model}")
    return kvboost.KVBoost.from_pretrained(model, **options)


def _embedding_model(name: str | None, device: str | None) -> Any:
    if name is None:
        return None
    import kvboost

    say.print(f"loading {name}")
    return kvboost.EmbeddingModel.from_pretrained(name, device=device)


def _events(settings: ServerSettings, given: ServeOptions) -> KVEvents | None:
    if given.kv_events is None:
        if given.kv_events_topic or given.kv_events_replay:
            raise ConfigError("--kv-events-topic and --kv-events-replay go with --kv-events")
        return None
    if settings.needs_key and not settings.shared_cache:
        raise ConfigError(
            "--kv-events announces no text of tenants, since everybody who listens could read it, "
            "and each key of --api-keys is a tenant; add --shared-cache, or leave --kv-events out"
        )
    more = given.kv_events_topic, given.kv_events_replay, given.kv_events_block
    return KVEvents(given.kv_events, *more)


def _keys(path: Path | None, *, starting: bool = False) -> tuple[ApiKey, ...]:
    from kvboost.serve.settings import parse_keys

    given = api_keys()
    if path is None:
        return parse_keys(given, "KVBOOST_API_KEYS")
    remedy = "name a file with a key on each line"
    lines = read_option_file("--api-keys", path, remedy, starting=starting).splitlines()
    keys = parse_keys([*lines, *given], str(path))
    if not keys:
        raise ConfigError(f"--api-keys {path} holds no key")
    return keys


def announce(engine: Any, settings: ServerSettings, host: str, port: int) -> None:
    """Says what is served and how to try it; on standard output only the address, for scripts."""
    from kvboost.serve.server import served_names
    from kvboost.serve.settings import is_loopback

    url = address(host, port, "http" if settings.tls_cert is None else "https")
    name = served_names(engine, settings)[0]
    messages = [{"role": "user", "content": "What is a lighthouse for?"}]
    body = json.dumps({"model": name, "messages": messages, "max_tokens": 64, "temperature": 0})
    key = " -H 'Authorization: Bearer KEY'" if settings.needs_key else ""
    say.print(f"serving {_description(engine, name)}")
    print(f"{url}/v1", flush=True)
    say.print("A page at / shows where each prompt's rows come from. To try it:")
    header = f"-H 'Content-Type: application/json'{key}"
    say.print(f"curl {url}/v1/chat/completions {header} -d '{body}'")
    if (events := engine.config.kv_events) is not None:
        told = "whoever can connect there can read the tokens of prompts"
        say.print(f"publishing KV events at {events.endpoint}: {told}")
    if not settings.needs_key and not is_loopback(host):
        say.print(
            f"warning: other machines can reach {host}, and the server asks for no key: anyone "
            "there can use the model and see what others have sent. Set --api-keys.",
            style="yellow",
        )
    if "*" in settings.cors_origins and not settings.needs_key:
        say.print(
            "warning: with --cors-origin '*' and no key, any web page that a browser opens can use "
            "the model and read what others have sent. Name the origins, or set --api-keys.",
            style="yellow",
        )
    if settings.needs_key and not any(key.is_admin for key in settings.keys):
        told = "no key is marked admin:NAME:KEY, so every key may inspect the cache"
        say.print(f"note: {told}", style="yellow")


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
