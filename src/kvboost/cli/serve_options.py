"""Options of ``kvboost serve`` for operators, and its configuration file."""

from __future__ import annotations

import inspect
import logging
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvboost.cli.common import unreadable
from kvboost.cli.option_files import read_option_file
from kvboost.config import unknown_option
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.serve.settings import ApiKey, ServerSettings

logger = logging.getLogger("kvboost.serve")

RELOADED = ("keys_file", "timeout", "mode", "log_prompts", "served_name")
"""Parameters whose new values a running server takes over. All others need a restart."""
_MISTAKE = "kvboost.config"
_VALUES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str, int, float), "text in quotes"),  # sizes and such may be plain numbers
    Path: ((str,), "text in quotes"),
}
"""What TOML may have for a parameter of each type, and how to say it."""


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
    for option, value in given.items():
        if option not in names:
            raise ConfigError(f"--config {path}: {unknown_option(option, names)}")
        expected = _mistaken_type(types[str(names[option])], value)
        if expected is not None:
            raise ConfigError(f"--config {path}: {option}={value!r} must be {expected}")
    return {str(names[option]): value for option, value in given.items()}


def _mistaken_type(annotation: Any, value: object) -> str | None:
    """What TOML must have for a parameter with ``annotation``; None if ``value`` is that."""
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
    typer.Option(
        help="A TOML file of these options, such as max-running = 16. Options of the command line "
        "come first.",
        is_eager=True,
        callback=_take_defaults,
    ),
]
ApiWorkers = Annotated[
    str,
    typer.Option(
        help="Processes for HTTP, tokenizing and the text of answers: 1 keeps this work from "
        "delaying the computation of answers, 0 does all in one process. auto: 1 on GPUs, 0 on "
        "CPUs, whose cores compute the answers."
    ),
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(
        help="A web page that may call the server from a browser, such as https://app.example; may "
        "be repeated; * allows every page."
    ),
]
FarKVBytes = Annotated[
    str,
    typer.Option(
        help="Memory for requests that --max-kv-bytes does not hold: of the host, if the model is "
        "on a GPU, or in a file. 0 refuses them."
    ),
]
FarKVBits = Annotated[
    int, typer.Option(help="Bits of that KV: 16, or 8 and 4 if the model is on a GPU.")
]
FarKVDir = Annotated[
    Path | None, typer.Option(help="The folder of these files; by default the temporary one.")
]
TlsCert = Annotated[
    Path | None, typer.Option(help="Serve HTTPS with this certificate, a PEM file.")
]
TlsKey = Annotated[
    Path | None, typer.Option(help="The certificate's private key, unless it is in --tls-cert.")
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        help="Send OpenTelemetry traces to this collector, such as http://127.0.0.1:4318."
    ),
]


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
    new = _reread(context)
    waiting = [
        option
        for option, name in _options(context)
        if name not in RELOADED and new[name] != context.params[name]
    ]
    if waiting:
        logger.warning("reload: a restart is needed for %s", ", ".join(waiting))
    return replace(
        settings,
        keys=read_keys(new["keys_file"]),
        timeout=new["timeout"] or None,
        mode=new["mode"],
        log_prompts=new["log_prompts"],
        served_names=tuple(new["served_name"] or ()),
    )


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
