"""``kvboost vllm``: commands for a running vLLM server that uses KVBoost."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvboost.cli.common import AsJson, errors, expanded, option, out, print_json, print_line, told
from kvboost.config import format_bytes
from kvboost.errors import ConfigError

if TYPE_CHECKING:
    from kvboost.integrations.vllm.client import VllmServer

app = typer.Typer(
    help="Fill, empty and look at the cache of a vLLM server that runs with KVBoost.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@dataclass(frozen=True)
class At:
    """The server, and the requests that are meant."""

    url: str = option("The address of vLLM's API.", "http://127.0.0.1:8000")
    model: Annotated[
        str | None,
        told("The model's name at the server; by default its first one.", "--model", "-m"),
    ] = None
    salt: str | None = option(
        "The cache_salt of the requests that are meant; by default those without."
    )
    api_key: str | None = option("The API key, if vLLM asks for one.", envvar="VLLM_API_KEY")

    def server(self) -> VllmServer:
        from kvboost.integrations.vllm.client import VllmServer

        return VllmServer(self.url, model=self.model, salt=self.salt, api_key=self.api_key)


@app.command()
@expanded
def warm(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE...", help="Text files; - reads standard input.")
    ],
    at: At,
    as_json: AsJson = False,
) -> None:
    """Have documents read, so that requests reuse them.

    Each document is one request for one token.

    Example: [bold]kvboost vllm warm handbook.txt faq.txt --url http://127.0.0.1:8000[/bold]
    """
    with errors():
        server = at.server()
        texts = [_text(name) for name in files]
        server.stats()  # fails if there is no connector to store anything
        done = []
        for name, text in zip(files, texts, strict=True):
            read = server.warm(text)
            done.append({"file": name, "tokens": read.tokens, "known_tokens": read.known})
            if not as_json:
                print_line(f"{name}: {read.tokens:,} tokens, {read.known:,} of them known before")
        chunks = server.stats()["chunks_of_salt"]
    if as_json:
        print_json({"documents": done, "chunks_of_salt": chunks})
    else:
        print_line(f"{chunks:,} chunks are stored")


@app.command()
@expanded
def forget(
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="What to forget; - reads standard input.")
    ] = None,
    everything: Annotated[
        bool, told("Forget all that was read under the salt.", "--everything")
    ] = False,
    *,
    at: At,
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
        server = at.server()
        if text is None:
            forgotten = server.forget_everything()
        else:
            forgotten = server.forget(sys.stdin.read() if text == "-" else text)
    if as_json:
        print_json({"forgotten": forgotten})
    else:
        print_line(f"{forgotten:,} chunks forgotten")


@app.command()
@expanded
def stats(at: At, as_json: AsJson = False) -> None:
    """Show what is stored, and what requests have reused since the start.

    Example: [bold]kvboost vllm stats --json[/bold]
    """
    with errors():
        found = at.server().stats()
    if as_json:
        print_json(found)
        return
    table = Table("tier", "chunks", "size", "of", "hits", box=None, padding=(0, 2, 0, 0))
    for name, tier in found["tiers"].items():
        table.add_row(name, *(_shown(tier, figure) for figure in _FIGURES))
    out.print(table, highlight=False, markup=False)
    print_line(f"{found['chunks']:,} chunks, {found['chunks_of_salt']:,} of them under this salt")
    tokens = ", ".join(f"{rows:,} {source}" for source, rows in found["prompt_tokens"].items())
    print_line(f"prompt tokens loaded: {tokens}")
    loads = found["loads"]
    print_line(
        f"loads: {loads['loaded']:,} in {found['load_seconds']:,.2f} s; {loads['failed']:,} failed"
    )


_FIGURES = ("chunks", "bytes", "max_bytes", "hits")


def _shown(tier: dict[str, Any], figure: str) -> str:
    if tier.get(figure) is None:
        return ""
    return format_bytes(tier[figure]) if "bytes" in figure else f"{tier[figure]:,}"


def _text(name: str) -> str:
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{name!r} cannot be read: {reason}; name a text file") from None
