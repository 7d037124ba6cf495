"""``kvboost cache``: commands for a cache folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from kvboost.cli.common import AsJson, errors, expanded, out, print_json, print_line, told
from kvboost.config import DEFAULT_MODEL, cache_dir, chosen_cache_secret, format_bytes, parse_bytes
from kvboost.errors import ConfigError, KVBoostError, ModelError

if TYPE_CHECKING:
    from kvboost.cache.folder import CacheFolder, Entry

app = typer.Typer(
    help="List, check, clean up, export and import the folder where KV is kept.\n\n"
    "Every command takes the folder as its last argument, as --dir or as --cache-dir.\n\n"
    "Example: [bold]kvboost cache ls ./kv[/bold]",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


@dataclass(frozen=True)
class Place:
    """The folder, as an argument or as an option."""

    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            show_default=False,
            help="The folder; by default KVBOOST_CACHE_DIR, or kv beside the models.",
        ),
    ] = None
    named: Annotated[
        list[Path] | None,
        told("The folder, named as an option.", "--dir", "--cache-dir", metavar="FOLDER"),
    ] = None

    def open(self, **options: Any) -> CacheFolder:
        """Raises ConfigError if the argument and the options differ."""
        from kvboost.cache.folder import CacheFolder

        paths = [self.folder, *(self.named or [])]
        given = {path.expanduser().absolute(): path for path in paths if path}
        if len(given) > 1:
            listed = " and ".join(repr(str(path)) for path in given.values())
            raise ConfigError(
                f"two folders are given, {listed}; name one, as an argument, --dir or --cache-dir"
            )
        chosen = next(iter(given.values()), None) or cache_dir()
        return CacheFolder(chosen, secret=chosen_cache_secret(), **options)


OfModel = Annotated[
    str | None, told("Only this model: its name, or the beginning of its id.", "--model", "-m")
]
_PREVIEW = 48
_SHOWN = ("name", "fingerprint", "bits", "chunks", "tokens")
"""The fields that ``info`` shows of each model."""


@app.command()
@expanded
def ls(
    place: Place,
    model: OfModel = None,
    text: Annotated[bool, told("Show the beginning of their text.", "--text")] = False,
    limit: Annotated[int, told("Chunks to print; 0 prints all.", min=0)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the chunks, the last used first.

    JSON lists all of them.

    Example: [bold]kvboost cache ls ./kv --text[/bold]
    """
    with errors():
        entries = place.open().entries(model)
        shown = entries[: limit or None] if not as_json else entries
        previews = _previews(shown) if text else None
    if as_json:
        print_json([_entry(entry, previews) for entry in shown])
        return
    table = _table("key", "model", "tokens", "from")
    for column in ("text",) if previews else ("depth", "lineage", "bits", "size", "used"):
        table.add_column(column, no_wrap=True)
    for entry in shown:
        info = entry.info
        row = [info.key[:12], _clean(info.origin.name, 16), f"{info.num_tokens}"]
        row.append(f"{info.base_position:,}")
        if previews:
            row.append(_clean(previews[info.key], 40))
        else:
            row += [f"{entry.depth}", info.lineage.value, f"{info.bits}"]
            row += [format_bytes(entry.nbytes), _ago(entry.used)]
        table.add_row(*row)
    out.print(table, highlight=False, markup=False)
    if len(entries) > len(shown):
        out.print(f"and {len(entries) - len(shown):,} more; --limit 0 prints all", style="dim")


@app.command()
@expanded
def info(place: Place, as_json: AsJson = False) -> None:
    """Show how much there is of each model.

    Example: [bold]kvboost cache info ./kv[/bold]
    """
    with errors():
        opened = place.open()
        found = opened.summary()
    if as_json:
        print_json(
            {
                "folder": str(opened.path),
                "chunks": found.chunks,
                "tokens": found.tokens,
                "bytes": found.nbytes,
                "quarantine": {"files": found.quarantined, "bytes": found.quarantined_bytes},
                "another_version": {"files": found.others, "bytes": found.other_bytes},
                "models": [
                    {**{name: getattr(one, name) for name in _SHOWN}, "bytes": one.nbytes}
                    for one in found.models
                ],
            }
        )
        return
    table = _table("model", "id", "bits", "chunks", "tokens", "size")
    for one in found.models:
        bits = ", ".join(map(str, one.bits))
        table.add_row(
            _clean(one.name),
            _clean(one.fingerprint[:12]),
            bits,
            f"{one.chunks:,}",
            f"{one.tokens:,}",
            format_bytes(one.nbytes),
        )
    if found.quarantined:
        size = format_bytes(found.quarantined_bytes)
        table.add_row("quarantine", "", "", f"{found.quarantined} files", "", size)
    if found.others:
        size = format_bytes(found.other_bytes)
        table.add_row("another version", "", "", f"{found.others} files", "", size)
    out.print(table, highlight=False, markup=False)
    print_line(
        f"{opened.path}: {found.chunks:,} chunks, {found.tokens:,} tokens, "
        f"{format_bytes(found.nbytes)}"
    )


@app.command()
@expanded
def verify(place: Place, as_json: AsJson = False) -> None:
    """Read every file and check it.

    Checks the checksum, or the signature if KVBOOST_CACHE_SECRET is set. Damaged files go into
    quarantine, and the exit code is 1.

    Example: [bold]kvboost cache verify ./kv[/bold]
    """
    with errors():
        verdict = place.open().verify()
    if as_json:
        print_json(vars(verdict))
    else:
        print_line(f"{_count(verdict.ok, 'whole chunk')}")
        for number, noun, more in (
            (verdict.bad, "damaged file", ", now in quarantine"),
            (verdict.unreadable, "unreadable file", ""),
            (verdict.signed, "signed chunk", " not checked: set KVBOOST_CACHE_SECRET"),
            (verdict.other_version, "chunk", " of another version of KVBoost, not checked"),
        ):
            if number:
                print_line(f"{_count(number, noun)}{more}", style="yellow")
    if not verdict:
        raise typer.Exit(1)


@app.command()
@expanded
def clear(
    place: Place,
    model: OfModel = None,
    yes: Annotated[bool, told("Do not ask.", "--yes", "-y")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove all chunks, or those of one model.

    Files in quarantine are removed as well.

    Example: [bold]kvboost cache clear ./kv --model smollm2-135m[/bold]
    """
    with errors():
        opened = place.open()
        found = opened.summary(model)
        what = _count(found.chunks, "chunk") + (f" of {_clean(model)}" if model else "")
        if not yes:
            question = f"Remove {what}, {format_bytes(found.nbytes)}, from {opened.path}?"
            typer.confirm(question, abort=True, err=True)
        removed = opened.clear(model)
    if as_json:
        print_json({"removed": removed})
    else:
        print_line(f"{_count(removed, 'file')} removed")


@app.command()
@expanded
def export(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The .tar file to write.")],
    place: Place,
    model: OfModel = None,
    key: Annotated[str | None, told("Only this chunk, and those before it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write chunks into one file, for another machine.

    Anyone who has the file can read the text.

    Example: [bold]kvboost cache export kv.tar ./kv --model smollm2-135m[/bold]
    """
    with errors():
        done = place.open().export(target, model=model, key=key)
    if as_json:
        print_json({"chunks": done.chunks, "bytes": done.nbytes, "bad": done.bad})
        return
    print_line(f"{_count(done.chunks, 'chunk')}, {format_bytes(done.nbytes)}, written to {target}")
    if done.bad:
        print_line(f"{_count(done.bad, 'damaged file')} left out", style="yellow")


@app.command("import")
@expanded
def install(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="A file that kvboost cache export wrote.")
    ],
    place: Place,
    max_size: Annotated[str, told("The most that the folder may hold.")] = "20GiB",
    as_json: AsJson = False,
) -> None:
    """Install the chunks of an exported file, each checked first.

    The model will believe that it has read them. Import only files from people you trust, or set
    KVBOOST_CACHE_SECRET: then only chunks that are signed with it are accepted.

    Example: [bold]kvboost cache import kv.tar ./kv --max-size 2GiB[/bold]
    """
    with errors():
        budget = parse_bytes(max_size, "--max-size")
        done = place.open(create=True, max_bytes=budget).install(source)
    if as_json:
        print_json(vars(done))
        return
    print_line(f"{_count(done.installed, 'chunk')} installed; {done.present:,} already there")
    if done.refused:
        signed = ", or not signed with KVBOOST_CACHE_SECRET" if chosen_cache_secret() else ""
        print_line(f"{done.refused:,} refused: not whole chunks{signed}", style="yellow")
    if done.no_room:
        print_line(f"{done.no_room:,} left out: no room in {max_size}", style="yellow")


@app.command()
@expanded
def forget(
    text: Annotated[
        str, typer.Argument(metavar="TEXT", help="What to forget; - reads standard input.")
    ],
    place: Place,
    model: Annotated[
        str | None, told("The model whose tokenizer splits the text.", "--model", "-m")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Remove every chunk that contains a text, and the chunks after it.

    Running programs keep what they hold in memory: close them first.

    Example: [bold]kvboost cache forget "the secret" ./kv[/bold]
    """
    with errors():
        opened = place.open()
        names = opened.models()
        chosen = model or (names[0] if len(names) == 1 else DEFAULT_MODEL)
        from kvboost.model.loading.load import load_tokenizer

        try:
            tokenizer = load_tokenizer(chosen, local_only=model is None)
        except ModelError as error:
            raise ModelError(f"{error}; --model names the model whose tokenizer to use") from None
        forgotten = opened.forget(sys.stdin.read() if text == "-" else text, tokenizer)
    others = [name for name in names if name != chosen]
    if as_json:
        print_json({"forgotten": forgotten, "model": chosen, "other_models": others})
        return
    print_line(
        f"{_count(forgotten, 'chunk')} removed: those that contain this text, in the tokens of "
        f"{_clean(chosen)}, and those after them"
    )
    if others:
        listing = ", ".join(map(_clean, others))
        print_line(
            f"not searched in the tokens of other models: try --model {listing}", style="yellow"
        )


def _entry(entry: Entry, previews: dict[str, str] | None) -> dict[str, Any]:
    info = entry.info
    described = {
        "key": info.key,
        "parent": info.parent,
        "depth": entry.depth,
        "model": info.origin.name,
        "fingerprint": info.origin.fingerprint,
        "tokens": info.num_tokens,
        "position": info.base_position,
        "lineage": info.lineage.value,
        "bits": info.bits,
        "bytes": entry.nbytes,
        "used": entry.used,
    }
    return described | ({"text": previews[info.key]} if previews else {})


def _previews(entries: list[Entry]) -> dict[str, str]:
    """The beginning of each chunk's text; ``?`` if its model's tokenizer is not on this machine."""
    from kvboost.model.loading.load import load_tokenizer

    @remember
    def decoder(name: str) -> Callable[[list[int]], str]:
        try:
            return load_tokenizer(name, local_only=True).decode
        except KVBoostError:
            return lambda ids: "?"

    return {
        entry.info.key: decoder(entry.info.origin.name)(entry.info.token_ids[:_PREVIEW].tolist())
        for entry in entries
    }


def _clean(text: str, width: int = 200) -> str:
    """Text from a file, made safe for a terminal: one short line without control characters."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(text.split()))
    return line if len(line) <= width else f"{line[: width - 1]}…"


def _table(*headings: str) -> Table:
    return Table(*headings, box=None, padding=(0, 1, 0, 0))


def _count(number: int, noun: str) -> str:
    """``1 chunk``, ``2 chunks``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _ago(moment: float) -> str:
    """How long ago that was."""
    seconds = max(0.0, time.time() - moment)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
