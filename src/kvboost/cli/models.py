"""``kvboost models``: the models that load by name, and what would fit here."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

import kvboost
from kvboost.cli.common import AsJson, errors, out, print_json, told
from kvboost.config import format_bytes, home

if TYPE_CHECKING:
    from kvboost.model.fit.features import Features
    from kvboost.model.fit.fits import Fit, Machine
    from kvboost.model.fit.headers import ModelHeader


OPTION_WIDTH = len("weights='packed'")
"""The options that most models need stay in one line, also on a terminal of 80 columns."""


class _Models(TyperGroup):
    """``kvboost models X`` is ``kvboost models fit X``, unless X is a command."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            args = ["fit", *args]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Models,
    help="List and install models, and see what would fit here.",
    invoke_without_command=True,
    subcommand_metavar="[MODEL] | COMMAND [ARGS]...",
)


@app.callback()
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models that load by name, install one, or see how a model would run here: kvboost
    models MODEL, with a .gguf file, a folder, a name or a hub id."""
    if context.invoked_subcommand is not None:
        return
    with errors():
        known = kvboost.list_models()
    if as_json:
        print_json([vars(info) for info in known])
        return
    table = Table(title="models that load by name")
    for heading in ("name", "installed", "description", "license"):
        table.add_column(heading)
    for info in known:
        state = "yes" if info.installed else "on first use"
        table.add_row(info.name, state, info.description, info.license)
    out.print(table)
    out.print(f"Installed models are in {home() / 'models'}.", style="dim", highlight=False)
    out.print("kvboost models MODEL says how a model would run here.", style="dim")


@app.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name from kvboost models.")],
) -> None:
    """Install a model now rather than on first use."""
    with errors():
        out.print(f"{name} is in {kvboost.pull_model(name)}", highlight=False)


@app.command()
def fit(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A .gguf file, a folder, a name or a hub id.")
    ],
    again: Annotated[
        bool, told("Measure the bandwidths again, on an idle machine.", "--measure")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what KVBoost does with a model's family, and what of the model would fit here, at which
    precision, resident or streamed, and how fast.

    Reads headers only: nothing is loaded, and no weights are downloaded. The first run measures
    the bandwidths of this machine, in a second or two.
    """
    with errors(), Console(stderr=True).status("looking"):
        from kvboost.model.fit.fits import Machine, fits
        from kvboost.model.fit.headers import read_header

        header, machine = read_header(model), Machine.here(again=again)
        found = fits(header, machine)
    if as_json or (context.parent is not None and context.parent.params.get("as_json")):
        print_json(_as_dict(header, machine, found))
        return
    out.print(_describe(header), highlight=False)
    if header.features is not None:
        out.print(_feature_table(header.model_type, header.features))
    out.print(_table(found, machine))
    out.print(
        "tokens/s is the most that the measured bandwidths allow one request: "
        + ", ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in rates_of(machine).items())
        + ". A busy machine measures too little: --measure does it again.",
        style="dim",
        highlight=False,
    )


def rates_of(machine: Machine) -> dict[str, float]:
    """The bandwidths that were measured, by name."""
    found = asdict(machine.rates)
    return {name: rate for name, rate in found.items() if rate is not None}


def _describe(header: ModelHeader) -> str:
    told = (
        f"{header.name}: {header.architecture}, {header.parameters / 1e9:.2f} B parameters, "
        f"{header.layers or '?'} layers, {header.kind} ({header.bits:.1f} bits a weight), "
        f"{format_bytes(header.stored_bytes)}"
    )
    if header.context:
        told += f", context {header.context:,}"
    if header.to_download:
        told += f"; {format_bytes(header.to_download)} would be downloaded"
    if header.unsupported:
        told += f"\nnot supported: {header.unsupported}"
    if header.state_bytes:
        told += f"\nstates: {format_bytes(header.state_bytes)} at each token where they are kept"
        if header.kv_numbers:
            told += f"; a token's KV takes {format_bytes(2 * header.kv_numbers)}"
    return told


_FEATURES = {
    "exact": "text at the start",
    "moved": "text elsewhere",
    "images": "images",
    "batch": "shared forwards",
    "pages": "pages and graphs on GPUs",
    "adapters": "LoRA adapters",
    "packed": "stays in 4 and 8 bits",
    "vllm": "reused inside vLLM",
}
"""The words for each of a model's features."""


def _feature_table(family: str | None, features: Features) -> Table:
    table = Table(title=f"models of the family {family}", show_header=False, pad_edge=False)
    for name, words in _FEATURES.items():
        table.add_row(words, getattr(features, name))
    return table


def _table(found: list[Fit], machine: Machine) -> Table:
    memory = f"{format_bytes(machine.free)} of {format_bytes(machine.memory)} memory free"
    gpu = f", {machine.gpu}: {format_bytes(machine.gpu_free)} free" if machine.gpu else ""
    table = Table(title=f"on this machine ({memory}{gpu})", pad_edge=False, collapse_padding=True)
    for heading in ("device", "weights", "size", "how", "KV tokens", "tokens/s"):
        table.add_column(heading, overflow="fold")
    table.add_column("options", overflow="fold", min_width=OPTION_WIDTH)
    for one in found:
        streamed = f" ({one.streamed_layers} layers)" if one.streamed_layers else ""
        runs = one.tokens_per_s is not None
        tokens = "?" if one.kv_tokens is None else f"{one.kv_tokens:,}"
        table.add_row(
            one.device,
            one.weights,
            format_bytes(one.num_bytes),
            one.how + streamed,
            tokens if runs else "–",
            f"{one.tokens_per_s:,.1f}" if one.tokens_per_s is not None else "–",
            one.options if runs else "",
        )
    return table


_SHOWN = (
    *("architecture", "model_type", "unsupported", "parameters", "layers", "kind", "stored_bytes"),
    *("to_download", "context", "state_bytes"),
)


def _as_dict(header: ModelHeader, machine: Machine, found: list[Fit]) -> dict[str, Any]:
    return {
        "model": header.name,
        **{name: getattr(header, name) for name in _SHOWN},
        "features": None if header.features is None else asdict(header.features),
        "bits_per_weight": header.bits,
        "kv_numbers_per_token": header.kv_numbers,
        "memory": machine.memory,
        "free_memory": machine.free,
        "gpu": machine.gpu,
        "free_gpu_memory": machine.gpu_free,
        "bytes_per_s": rates_of(machine),
        "fits": [asdict(one) for one in found],
    }
