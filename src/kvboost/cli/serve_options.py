"""Options of ``kvboost serve`` for operators, and its configuration file."""

from __future__ import annotations

import inspect
import logging
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvboost.cli.common import (
    RENAMED,
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
    option,
    speculation,
    told,
    unreadable,
)
from kvboost.cli.option_files import read_option_file
from kvboost.config import (
    DEFAULT_MODEL,
    MOST_CONTEXTS,
    EngineConfig,
    EngineOptions,
    chosen_cache_dir,
    format_bytes,
    unknown_option,
)
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.serve.settings import ApiKey, ServerSettings

logger = logging.getLogger("kvboost.serve")

_RELOADED = {"keys_file": "keys", "served_name": "served_names", "image_host": "image_hosts"}
"""Options that a running server takes over under another name."""
_MISTAKE = "kvboost.config"
_VALUES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str, int, float), "text in quotes"),  # sizes and such may be plain numbers
    Path: ((str,), "text in quotes"),
}
"""The TOML types that are allowed for a parameter of each type, and their name in errors."""


def read_config(context: typer.Context, path: Path, *, starting: bool = False) -> dict[str, Any]:
    """The options in the TOML file ``path``, by the names of the command's parameters. An option
    has its name on the command line, without the dashes at the beginning."""
    remedy = "name a TOML file of options"
    text = read_option_file("--config", path, remedy, starting=starting)
    try:
        given = tomllib.loads(text)
    except ValueError as error:
        raise unreadable("--config", path, error, remedy) from None
    names = {
        option.removeprefix("--"): parameter.name
        for parameter in context.command.params
        for option in parameter.opts
        if option.startswith("--") and parameter.name not in ("config", "help")
    }
    assert context.command.callback is not None
    types = get_type_hints(inspect.unwrap(context.command.callback))
    for name, value in given.items():
        if name not in names:
            raise ConfigError(f"--config {path}: {unknown_option(name, names)}")
        expected = _mistaken_type(types[str(names[name])], value)
        if expected is not None:
            raise ConfigError(f"--config {path}: {name}={value!r} must be {expected}")
    return {str(names[name]): value for name, value in given.items()}


def _mistaken_type(annotation: Any, value: object) -> str | None:
    """The name of the TOML type that a parameter with ``annotation`` needs; None if ``value`` has
    it."""
    kinds = (annotation, *get_args(annotation))  # list[str] | None wants list[str]
    wanted = next(kind for kind in kinds if kind in _VALUES or get_origin(kind) is list)
    if get_origin(wanted) is list:
        allowed, _ = _VALUES[get_args(wanted)[0]]
        is_list = isinstance(value, list) and all(type(one) in allowed for one in value)
        return None if is_list else 'a list, such as ["a", "b"]'
    allowed, name = _VALUES[wanted]
    return None if type(value) in allowed else name  # to isinstance, true is a whole number


def _take_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the options in ``path`` the defaults of the command line. A mistake in it is kept for
    ``check_config``: ``--help`` must work without the file."""
    if path is not None and not context.resilient_parsing:
        try:
            context.default_map = read_config(context, path, starting=True)
        except ConfigError as error:
            context.meta[_MISTAKE] = error
    return path


def check_config(context: typer.Context) -> None:
    """Raises ConfigError if the configuration file has a mistake."""
    if _MISTAKE in context.meta:
        raise context.meta[_MISTAKE]


ConfigFile = Annotated[
    Path | None,
    told(
        "A TOML file of these options, such as max-running = 16. Options of the command line "
        "come first.",
        is_eager=True,
        callback=_take_defaults,
    ),
]


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``kvboost serve``. Those of the engine and of the server have their names, or
    another one in ``RENAMED``."""

    model: Model = DEFAULT_MODEL
    host: Host = "127.0.0.1"
    port: int = option("The port; 0 takes a free one.", 8000, min=0, max=65535)
    mode: Mode = "chunk_kv_reuse"
    cache_dir: CacheDir = None
    max_cache_bytes: str = option(
        "Memory for the cache, such as 500MB or 2GiB.", format_bytes(EngineConfig.max_cache_bytes)
    )
    disk_cache_bytes: str = option(
        "Disk space for the cache in --cache-dir.", format_bytes(EngineConfig.disk_cache_bytes)
    )
    remote_cache: str | None = option("A store that machines share, such as redis://host:6379.")
    remote_cache_bytes: str | None = option(
        "Space for the cache in --remote-cache; only a Redis needs no limit."
    )
    warm: list[Path] | None = option(
        "A text file, or a folder of them, to read before others ask; may be repeated. "
        "Requests are answered meanwhile, and /ready says warming until it is done."
    )
    pin: bool = option("Never evict the files of --warm while the server runs.", False)
    warm_for: list[str] | None = option("The name of a key that --warm reads for; may be repeated.")
    warm_contexts: int | None = option(
        "In how many contexts the files of --warm are read: at first by themselves, then, while "
        "the server is idle and less than half of the cache is taken, each after another file. "
        "Answers over them come closer to a full prefill; each context takes as much memory as the "
        f"first. Default: {MOST_CONTEXTS}, or 1 with --heal off.",
        min=1,
        max=MOST_CONTEXTS,
    )
    max_pinned_bytes: str | None = option(
        "Memory that pinned text may take; by default half of the cache."
    )
    kv_bits: KVBits = EngineConfig.kv_cache_bits
    heal: str = option(
        "When text computed on moved text is computed again, exactly: auto, idle or off.",
        EngineConfig.heal,
    )
    max_audit_kl: float | None = option(
        "Recompute twice as much of moved text if answers are further than this from exact "
        "ones (mean KL).",
        min=0.0,
    )
    max_images: int = option(
        "The most images of a prompt, for models that see.", EngineConfig.max_images, min=0
    )
    max_image_bytes: str = option(
        "The largest file of an image, such as 20MiB.", format_bytes(EngineConfig.max_image_bytes)
    )
    max_image_pixels: int = option(
        "The most pixels of an image before it is scaled down.",
        EngineConfig.max_image_pixels,
        min=1,
    )
    image_host: list[str] | None = option(
        "A host from which images of prompts may be fetched, such as images.example.com, "
        "*.example.com or 10.0.0.5:9000; may be repeated. By default requests bring their images."
    )
    speculate: Speculate = str(EngineConfig.speculate)
    draft_model: DraftModel = None
    device_memory: DeviceMemory = None
    host_memory: HostMemory = None
    max_running: int | None = option("Requests that run at once. Default: 16, on a GPU 64.", min=1)
    max_waiting: int = option(
        "Requests that may wait; more are answered 429.", EngineConfig.max_waiting, min=0
    )
    max_kv_bytes: str | None = option(
        "Memory for running requests; by default a quarter of the machine's memory, or half of "
        "what is free on a GPU."
    )
    far_kv_bytes: str = option(
        "Memory for requests that --max-kv-bytes does not hold: of the host, if the model is "
        "on a GPU, or in a file. 0 refuses them.",
        "0",
    )
    far_kv_bits: int = option("Bits of that KV: 16, or 8 and 4 if the model is on a GPU.", 16)
    far_kv_dir: Path | None = option("The folder of these files; by default the temporary one.")
    state_every: int | None = option(
        "Of a model with states: keep them at multiples of so many tokens; by default they "
        "take no more memory than the KV.",
        min=16,
    )
    max_pause: float = option(
        "About how many seconds a running answer waits for its next token at most while other "
        "prompts are read; 0 sets no limit.",
        EngineConfig.max_pause,
        min=0.0,
    )
    timeout: float = option("Seconds a request may take; 0 sets no limit.", 600.0, min=0.0)
    drain_seconds: float = option(
        "Seconds that running answers get when the server stops.", 30.0, min=0.0
    )
    keys_file: Path | None = option(
        "A file of keys, one per line: key, name:key or admin:name:key. Keys in "
        "KVBOOST_API_KEYS, separated by commas, are added.",
        flag="--api-keys",
    )
    shared_cache: bool = option("All keys share one cache.", False)
    strict_fields: bool = option(
        "Refuse requests with fields that the server does not know. By default they are left "
        "out, and the answer says so.",
        False,
    )
    metrics: str = option("Who may read /metrics: open, key (an administrator's), or off.", "open")
    log_prompts: bool = option("Write prompts to the log.", False)
    kv_events: str | None = option(
        "Publish which text the cache holds, as vLLM does, for routers such as llm-d and "
        "Dynamo: tcp://*:5557."
    )
    kv_events_topic: str = option("The topic of these events; llm-d expects kv@ADDRESS@MODEL.", "")
    kv_events_replay: str | None = option(
        "Where routers ask for events that they have missed: tcp://*:5558."
    )
    kv_events_block: int = option(
        "Tokens in a block of these events, as the router expects.", 16, min=1
    )
    embedding_model: str | None = option(
        "What /v1/embeddings uses: all-minilm-l6-v2, a folder or a hub id. By default the "
        "model itself."
    )
    served_name: list[str] | None = option("The model's name in requests; may be repeated.")
    lora: list[str] | None = option(
        "A LoRA adapter that requests may name; may be repeated.", metavar="NAME=PATH"
    )
    allow_host: AllowHost = None
    device: Device = None
    dtype: Dtype = None
    weights: Weights = EngineConfig.weights
    tp_size: int = option("GPUs to split the model over; must divide its KV heads.", 1, min=1)
    rehearse: bool | None = option(
        "Answer made-up prompts of many sizes before taking requests, so that users do not "
        "wait while graphs of new sizes are recorded. By default on GPUs.",
        flag="--rehearse/--no-rehearse",
    )
    config: ConfigFile = None
    cors_origin: list[str] | None = option(
        "A web page that may call the server from a browser, such as https://app.example; may "
        "be repeated; * allows every page."
    )
    tls_cert: Path | None = option("Serve HTTPS with this certificate, a PEM file.")
    tls_key: Path | None = option("The certificate's private key, unless it is in --tls-cert.")
    otlp_endpoint: str | None = option(
        "Send OpenTelemetry traces to this collector, such as http://127.0.0.1:4318."
    )
    api_workers: str = option(
        "Processes for HTTP, tokenizing and the text of answers: 1 keeps this work from "
        "delaying the computation of answers, 0 does all in one process. auto: 1 on GPUs, 0 on "
        "CPUs, whose cores compute the answers.",
        "auto",
    )

    def for_engine(self) -> dict[str, Any]:
        """The options of the engine. None leaves ``max_running`` to the device."""
        own = {one.name for one in fields(self)}
        names = {name: RENAMED.get(name, name) for name in EngineOptions.__annotations__}
        given = {
            name: getattr(self, own_name) for name, own_name in names.items() if own_name in own
        }
        if self.max_running is None:
            del given["max_running"]
        given["disk_cache_dir"] = self.cache_dir or chosen_cache_dir()
        given["speculate"] = speculation(self.speculate)
        return given | {"device": self.device, "dtype": self.dtype, "tp_size": self.tp_size}

    def for_server(self) -> dict[str, Any]:
        """The settings of the server that need no more than to be passed on."""
        own = {one.name for one in fields(self)}
        from kvboost.serve.settings import ServerSettings

        given = {
            one.name: getattr(self, one.name) for one in fields(ServerSettings) if one.name in own
        }
        return given | {
            "timeout": self.timeout or None,
            "served_names": tuple(self.served_name or ()),
            "image_hosts": tuple(self.image_host or ()),
            "cors_origins": tuple(self.cors_origin or ()),
            "warm_for": tuple(self.warm_for or ()),
            "warm_contexts": self.warm_contexts or (1 if self.heal == "off" else MOST_CONTEXTS),
        }


def num_api_workers(given: str) -> int | None:
    """The option ``--api-workers``; None: what suits the device."""
    if given not in ("auto", "0", "1"):
        raise ConfigError(f"--api-workers {given} must be auto, 0 or 1")
    if sys.platform == "win32":  # a socket cannot be handed to another process there
        if given == "1":
            raise ConfigError("--api-workers 1 needs Linux or macOS; on Windows it must be 0")
        return 0
    return None if given == "auto" else int(given)


def reread_settings(
    context: typer.Context,
    settings: ServerSettings,
    read_keys: Callable[[Path | None], tuple[ApiKey, ...]],
) -> ServerSettings:
    """The settings of a running server after its files have changed. Logs the options that changed
    but need a restart. Raises ConfigError for a mistake."""
    from kvboost.serve.settings import RELOADABLE

    new = _reread(context)
    waiting = [
        option
        for option, name in _options(context)
        if _RELOADED.get(name, name) not in RELOADABLE and new[name] != context.params[name]
    ]
    if waiting:
        logger.warning("reload: a restart is needed for %s", ", ".join(waiting))
    read = ServeOptions(**new).for_server() | {"keys": read_keys(new["keys_file"])}
    return replace(settings, **{name: read[name] for name in RELOADABLE})


def _reread(context: typer.Context) -> dict[str, Any]:
    """The parameters of the command, with what its configuration file says now. Options that it no
    longer has get their defaults."""
    path = context.params["config"]
    context.default_map = {} if path is None else read_config(context, path)
    new = dict(context.params)
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name not in new or (source is not None and source.name == "COMMANDLINE"):
            continue
        value = parameter.get_default(context)
        try:
            new[name] = parameter.process_value(context, value)
        except typer.BadParameter as error:
            raise ConfigError(f"--config {path}: {name}={value!r}: {error}") from None
    return new


def _options(context: typer.Context) -> list[tuple[str, str]]:
    """The options of the command and the names of their parameters."""
    return [
        (parameter.opts[0], str(parameter.name))
        for parameter in context.command.params
        if parameter.name in context.params and parameter.name != "config"
    ]
