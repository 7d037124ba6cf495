"""``kvboost vllm``: commands for a running vLLM server that uses KVBoost."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvboost.cli.common import AsJson, errors, out, print_json
from kvboost.config import format_bytes
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.integrations.vllm.client import VllmServer

app = typer.Typer(
    help="Fill, empty and look at the cache of a vLLM server that runs with KVBoost.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

Url = Annotated[str, typer.Option(help="The address of vLLM's API.")]
ServedModel = Annotated[
    str | None,
    typer.Option("--model", "-m", help="The model's name at the server; by default its first one."),
]
Salt = Annotated[
    str | None,
    typer.Option(help="The cache_salt of the requests that are meant; by default those without."),
]
Key = Annotated[
    str | None, typer.Option(envvar="VLLM_API_KEY", help="The API key, if vLLM asks for one.")
]
LOCAL = "http://127.0.0.1:8000"


@app.command()
def warm(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Text files; - reads standard input.")
    ],
    url: Url = LOCAL,
    model: ServedModel = None,
    salt: Salt = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Have documents read, so that requests reuse them.

    Each document is one request for one token.

    Example: [bold]kvboost vllm warm handbook.txt faq.txt --url http://127.0.0.1:8000[/bold]
    """
    with errors():
        server = _server(url, model, salt, api_key)
        texts = [_text(name) for name in files]
        server.stats()  # fails if there is no connector to store anything
        done = []
        for name, text in zip(files, texts, strict=True):
            read = server.warm(text)
            done.append({"file": name, "tokens": read.tokens, "known_tokens": read.known})
            if not as_json:
                _say(f"{name}: {read.tokens:,} tokens, {read.known:,} of them known before")
        chunks = server.stats()["chunks_of_salt"]
    if as_json:
        print_json({"documents": done, "chunks_of_salt": chunks})
    else:
        _say(f"{chunks:,} chunks are stored")


@app.command()
def forget(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What to forget; - reads standard input.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="Forget all that was read under the salt.")
    ] = False,
    url: Url = LOCAL,
    model: ServedModel = None,
    salt: Salt = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Remove every chunk that contains a text, and the chunks after it, from every tier.

    Only what was read under --salt is removed. vLLM's own prefix cache keeps its pages until it
    needs them for something else, or until POST /reset_prefix_cache.

    Example: [bold]kvboost vllm forget "the secret"[/bold]
    """
    with errors():
        if (text is None) is not everything:
            raise ConfigError("name a text to forget, or --everything, and not both")
        server = _server(url, model, salt, api_key)
        if text is None:
            forgotten = server.forget_everything()
        else:
            forgotten = server.forget(sys.stdin.read() if text == "-" else text)
    if as_json:
        print_json({"forgotten": forgotten})
    else:
        _say(f"{forgotten:,} chunks forgotten")


@app.command()
def stats(
    url: Url = LOCAL,
    model: ServedModel = None,
    salt: Salt = None,
    api_key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Show what is stored, and what requests have reused since the start.

    Example: [bold]kvboost vllm stats --json[/bold]
    """
    with errors():
        found = _server(url, model, salt, api_key).stats()
    if as_json:
        print_json(found)
        return
    table = Table("tier", "chunks", "size", "of", "hits", box=None, padding=(0, 2, 0, 0))
    for name, tier in found["tiers"].items():
        table.add_row(name, *(_shown(tier, figure) for figure in _FIGURES))
    out.print(table, highlight=False, markup=False)
    _say(f"{found['chunks']:,} chunks, {found['chunks_of_salt']:,} of them under this salt")
    tokens = ", ".join(f"{rows:,} {source}" for source, rows in found["prompt_tokens"].items())
    _say(f"prompt tokens loaded: {tokens}")
    loads = found["loads"]
    _say(
        f"loads: {loads['loaded']:,} in {found['load_seconds']:,.2f} s; {loads['failed']:,} failed"
    )


_FIGURES = ("chunks", "bytes", "max_bytes", "hits")


def _shown(tier: dict[str, Any], figure: str) -> str:
    if tier.get(figure) is None:
        return ""
    return format_bytes(tier[figure]) if "bytes" in figure else f"{tier[figure]:,}"


def _server(url: str, model: str | None, salt: str | None, api_key: str | None) -> VllmServer:
    from kvboost.integrations.vllm.client import VllmServer

    return VllmServer(url, model=model, salt=salt, api_key=api_key)


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name!r} cannot be read: {reason}; name a text file") from None


def _say(line: str) -> None:
    out.print(line, highlight=False, markup=False, soft_wrap=True)
