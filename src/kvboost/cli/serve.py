"""``kvboost serve``: a model as a server with OpenAI's API."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvboost.cli.common import (
    AllowHost,
    CacheDir,
    Device,
    DeviceMemory,
    DraftModel,
    Dtype,
    Host,
    HostMemory,
    KVBits,
    Mode,
    Model,
    Speculate,
    Weights,
    errors,
    only_local,
    say,
    speculation,
)
from kvboost.cli.option_files import read_option_file
from kvboost.cli.serve_announcement import announce
from kvboost.cli.serve_options import (
    ApiWorkers,
    ConfigFile,
    CorsOrigin,
    FarKVBits,
    FarKVBytes,
    FarKVDir,
    OtlpEndpoint,
    StateEvery,
    TlsCert,
    TlsKey,
    check_config,
    num_api_workers,
    reread_settings,
)
from kvboost.cli.serve_signals import signals_while_loading
from kvboost.config import (
    DEFAULT_MODEL,
    MOST_CONTEXTS,
    EngineConfig,
    KVEvents,
    api_keys,
    bound_kernel_caches,
    chosen_cache_dir,
    format_bytes,
    install_extra,
)
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.serve.settings import ApiKey, ServerSettings


def serve(
    context: typer.Context,
    model: Model = DEFAULT_MODEL,
    host: Host = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")
    ] = 8000,
    mode: Mode = "chunk_kv_reuse",
    cache_dir: CacheDir = None,
    max_cache_bytes: Annotated[
        str, typer.Option(help="Memory for the cache, such as 500MB or 2GiB.")
    ] = format_bytes(EngineConfig.max_cache_bytes),
    disk_cache_bytes: Annotated[
        str, typer.Option(help="Disk space for the cache in --cache-dir.")
    ] = format_bytes(EngineConfig.disk_cache_bytes),
    remote_cache: Annotated[
        str | None,
        typer.Option(help="A store that machines share, such as redis://host:6379."),
    ] = None,
    remote_cache_bytes: Annotated[
        str | None,
        typer.Option(help="Space for the cache in --remote-cache; only a Redis needs no limit."),
    ] = None,
    warm: Annotated[
        list[Path] | None,
        typer.Option(
            help="A text file, or a folder of them, to read before others ask; may be repeated. "
            "Requests are answered meanwhile, and /ready says warming until it is done."
        ),
    ] = None,
    pin: Annotated[
        bool, typer.Option("--pin", help="Never evict the files of --warm while the server runs.")
    ] = False,
    warm_for: Annotated[
        list[str] | None,
        typer.Option(help="The name of a key that --warm reads for; may be repeated."),
    ] = None,
    warm_contexts: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_CONTEXTS,
            help="In how many contexts the files of --warm are read: at first by themselves, then, "
            "while the server is idle and less than half of the cache is taken, each after another "
            "file. Answers over them come closer to a full prefill; each context takes as much "
            f"memory as the first. Default: {MOST_CONTEXTS}, or 1 with --heal off.",
        ),
    ] = None,
    max_pinned_bytes: Annotated[
        str | None,
        typer.Option(help="Memory that pinned text may take; by default half of the cache."),
    ] = None,
    kv_bits: KVBits = EngineConfig.kv_cache_bits,
    heal: Annotated[
        str,
        typer.Option(
            help="When text computed on moved text is computed again, exactly: auto, idle or off."
        ),
    ] = EngineConfig.heal,
    max_audit_kl: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Recompute twice as much of moved text if answers are further than this from "
            "exact ones (mean KL).",
        ),
    ] = None,
    max_images: Annotated[
        int, typer.Option(min=0, help="The most images of a prompt, for models that see.")
    ] = EngineConfig.max_images,
    max_image_bytes: Annotated[
        str, typer.Option(help="The largest file of an image, such as 20MiB.")
    ] = format_bytes(EngineConfig.max_image_bytes),
    max_image_pixels: Annotated[
        int, typer.Option(min=1, help="The most pixels of an image before it is scaled down.")
    ] = EngineConfig.max_image_pixels,
    speculate: Speculate = str(EngineConfig.speculate),
    draft_model: DraftModel = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    max_running: Annotated[
        int | None,
        typer.Option(min=1, help="Requests that run at once. Default: 16, on a GPU 64."),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that may wait; more are answered 429.")
    ] = EngineConfig.max_waiting,
    max_kv_bytes: Annotated[
        str | None,
        typer.Option(help="Memory for running requests; by default a quarter of all memory."),
    ] = None,
    far_kv_bytes: FarKVBytes = "0",
    far_kv_bits: FarKVBits = 16,
    far_kv_dir: FarKVDir = None,
    state_every: StateEvery = None,
    sharing_wait: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds a request may wait for another that is reading the same text."
        ),
    ] = EngineConfig.sharing_wait,
    max_pause: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="About how many seconds a running answer waits for its next token at most while "
            "other prompts are read; 0 sets no limit.",
        ),
    ] = EngineConfig.max_pause,
    timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds a request may take; 0 sets no limit.")
    ] = 600.0,
    drain_seconds: Annotated[
        float, typer.Option(min=0.0, help="Seconds that running answers get when the server stops.")
    ] = 30.0,
    keys_file: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            help="A file of keys, one per line: key, name:key or admin:name:key. Keys in "
            "KVBOOST_API_KEYS, separated by commas, are added.",
        ),
    ] = None,
    shared_cache: Annotated[
        bool, typer.Option("--shared-cache", help="All keys share one cache.")
    ] = False,
    strict_fields: Annotated[
        bool,
        typer.Option(
            "--strict-fields",
            help="Refuse requests with fields that the server does not know. By default they are "
            "left out, and the answer says so.",
        ),
    ] = False,
    metrics: Annotated[
        str,
        typer.Option(help="Who may read /metrics: open, key (an administrator's), or off."),
    ] = "open",
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts to the log.")
    ] = False,
    kv_events: Annotated[
        str | None,
        typer.Option(
            help="Publish which text the cache holds, as vLLM does, for routers such as llm-d and "
            "Dynamo: tcp://*:5557."
        ),
    ] = None,
    kv_events_topic: Annotated[
        str, typer.Option(help="The topic of these events; llm-d expects kv@ADDRESS@MODEL.")
    ] = "",
    kv_events_replay: Annotated[
        str | None,
        typer.Option(help="Where routers ask for events that they have missed: tcp://*:5558."),
    ] = None,
    kv_events_block: Annotated[
        int, typer.Option(min=1, help="Tokens in a block of these events, as the router expects.")
    ] = 16,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="What /v1/embeddings uses: all-minilm-l6-v2, a folder or a hub id. By default "
            "the model itself."
        ),
    ] = None,
    served_name: Annotated[
        list[str] | None, typer.Option(help="The model's name in requests; may be repeated.")
    ] = None,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH", help="A LoRA adapter that requests may name; may be repeated."
        ),
    ] = None,
    allow_host: AllowHost = None,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = EngineConfig.weights,
    tp_size: Annotated[
        int, typer.Option(min=1, help="GPUs to split the model over; must divide its KV heads.")
    ] = 1,
    rehearse: Annotated[
        bool | None,
        typer.Option(
            "--rehearse/--no-rehearse",
            help="Answer made-up prompts of many sizes before taking requests, so that users do "
            "not wait while graphs of new sizes are recorded. By default on GPUs.",
        ),
    ] = None,
    config: ConfigFile = None,
    cors_origin: CorsOrigin = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    otlp_endpoint: OtlpEndpoint = None,
    api_workers: ApiWorkers = "auto",
) -> None:
    """Serve a model over OpenAI's, Anthropic's and Ollama's APIs, with a page at / to watch it.

    Ctrl-C or SIGTERM stops it: running answers end and the cache is written. SIGHUP reads --config,
    --api-keys and the TLS files again; the log says what changed and what needs a restart.

    Example: [bold]kvboost serve --cache-dir ./kv --api-keys keys.txt[/bold]
    """
    bound_kernel_caches()
    reloads = bool(config or keys_file or tls_cert)
    with errors(), signals_while_loading(reloads=reloads) as loading:
        check_config(context)
        try:
            from kvboost.serve.process import bind
            from kvboost.serve.process import serve as run
            from kvboost.serve.remote.processes import serve as run_apart
            from kvboost.serve.settings import ServerSettings, is_loopback
            from kvboost.serve.warm_files import read_texts
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"kvboost serve needs {error.name}; {install_extra('serve')}"
            ) from None

        workers = num_api_workers(api_workers)
        keys = _keys(keys_file, starting=True)
        texts, left_out = read_texts(warm or (), ServerSettings.max_document_bytes)
        if left_out:
            say.print(f"not text, so not warmed: {', '.join(left_out)}", markup=False)
        settings = ServerSettings(
            served_names=tuple(served_name or ()),
            mode=mode,
            keys=keys,
            shared_cache=shared_cache,
            strict_fields=strict_fields,
            warm=texts,
            pin=pin,
            warm_for=tuple(warm_for or ()),
            warm_contexts=warm_contexts or (1 if heal == "off" else MOST_CONTEXTS),
            embedding_model=_embedding_model(embedding_model, device),
            timeout=timeout or None,
            drain_seconds=drain_seconds,
            metrics=metrics,
            log_prompts=log_prompts,
            allowed_hosts=only_local(allow_host or ()) if is_loopback(host) and not keys else (),
            cors_origins=tuple(cors_origin or ()),
            tls_cert=tls_cert,
            tls_key=tls_key,
            otlp_endpoint=otlp_endpoint,
        )
        reread = partial(reread_settings, context, settings, _keys) if reloads else None
        events = _events(settings, kv_events, kv_events_topic, kv_events_replay, kv_events_block)
        adapters = _adapters(lora or [])
        folder = cache_dir or chosen_cache_dir()
        listening = bind(host, port)
        with (
            listening,
            _load(
                model,
                device=device,
                dtype=dtype,
                weights=weights,
                tp_size=tp_size,
                disk_cache_dir=folder,
                max_cache_bytes=max_cache_bytes,
                max_pinned_bytes=max_pinned_bytes,
                disk_cache_bytes=disk_cache_bytes,
                remote_cache_url=remote_cache,
                remote_cache_bytes=remote_cache_bytes,
                kv_cache_bits=kv_bits,
                heal=heal,
                max_audit_kl=max_audit_kl,
                max_images=max_images,
                max_image_bytes=max_image_bytes,
                max_image_pixels=max_image_pixels,
                speculate=speculation(speculate),
                draft_model=draft_model,
                device_memory=device_memory,
                host_memory=host_memory,
                **({} if max_running is None else {"max_running": max_running}),
                max_waiting=max_waiting,
                max_kv_bytes=max_kv_bytes,
                far_kv_bytes=far_kv_bytes,
                far_kv_bits=far_kv_bits,
                far_kv_dir=far_kv_dir,
                state_every=state_every,
                sharing_wait=sharing_wait,
                max_pause=max_pause,
                kv_events=events,
            ) as engine,
        ):
            for name, path in adapters.items():
                engine.load_adapter(name, path)
            if engine.device.type == "cuda" if rehearse is None else rehearse:
                say.print("rehearsing requests of many sizes; --no-rehearse leaves it out")
                say.print(f"rehearsed in {engine.rehearse():.0f} s")
            port = listening.getsockname()[1]

            def ready() -> None:
                announce(engine, settings, host, port)
                loading.ended()

            on_gpu = engine.device.type == "cuda"
            chosen = run_apart if (on_gpu if workers is None else workers) else run
            chosen(engine, settings, listening, ready, reread)
    kept = f"; the cache is in {folder}" if folder else ""
    say.print(f"stopped{kept}", markup=False)


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

    say.print(f"loading {model}", markup=False)
    return kvboost.KVBoost.from_pretrained(model, **options)


def _embedding_model(name: str | None, device: str | None) -> Any:
    if name is None:
        return None
    import kvboost

    say.print(f"loading {name}", markup=False)
    return kvboost.EmbeddingModel.from_pretrained(name, device=device)


def _events(
    settings: ServerSettings, endpoint: str | None, topic: str, replay: str | None, block: int
) -> KVEvents | None:
    if endpoint is None:
        if topic or replay:
            raise ConfigError("--kv-events-topic and --kv-events-replay go with --kv-events")
        return None
    if settings.needs_key and not settings.shared_cache:
        raise ConfigError(
            "--kv-events announces no text of tenants, since everybody who listens could read it, "
            "and each key of --api-keys is a tenant; add --shared-cache, or leave --kv-events out"
        )
    return KVEvents(endpoint, topic, replay, block)


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
