"""The commands that stand on their own, and where the groups are hung up."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.cli import bench, cache, serve
from kvboost.cli.common import (
    AsJson,
    CacheDir,
    Device,
    Dtype,
    KVBits,
    MaxNewTokens,
    Mode,
    Model,
    Temperature,
    describe,
    errors,
    load_engine,
    out,
    print_json,
    summary,
)
from kvboost.config import DEFAULT_MODEL, home

app = typer.Typer(
    name="kvboost",
    help="A language model should never read the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
models_app = typer.Typer(help="Models that load by name.", invoke_without_command=True)
app.add_typer(models_app, name="models")
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.command()(serve.serve)


@app.command()
def demo(
    model: Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: Dtype = "float32",
    as_json: AsJson = False,
) -> None:
    """A growing chat, a code file asked about three times, and documents in three orders: each
    prompt without and with reuse.

    In float32, so that the answers can be compared token by token; --dtype bfloat16 is faster.
    """
    with errors(), load_engine(model, device, dtype) as engine:
        from kvboost.cli import demo as demonstration

        asked = demonstration.run(engine, Console(stderr=True) if as_json else out)
    if as_json:
        print_json(
            [
                {
                    "prompt": one.title,
                    "baseline": describe(one.baseline),
                    "reuse": describe(one.reuse),
                    "same": one.same,
                    "mean_kl": one.mean_kl,
                }
                for one in asked
            ]
        )


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")],
    model: Model = DEFAULT_MODEL,
    max_new_tokens: MaxNewTokens = 64,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text.")] = None,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the chat template.")] = True,
    mode: Mode = "chunk_kv_reuse",
    cache_dir: CacheDir = None,
    kv_bits: KVBits = 16,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming.

    Every run begins with an empty cache, unless --cache-dir keeps it in a folder.

    Example: [bold]kvboost generate - --cache-dir ./kv < report.txt[/bold]
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with errors(), load_engine(model, device, dtype, cache_dir, kv_bits) as engine:
        stream = engine.stream(
            [{"role": "user", "content": text}] if chat else text,
            max_new_tokens,
            mode,
            temperature=temperature,
            seed=seed,
            stop=stop,
        )
        for piece in stream:
            if not as_json:
                print(piece, end="", flush=True)
        if as_json:
            print_json(describe(stream.result))
        else:
            print()
            out.print(summary(stream.result), style="dim")


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the assistant should be.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable.")] = None,
    mode: Mode = "chunk_kv_reuse",
    cache_dir: CacheDir = None,
    kv_bits: KVBits = 16,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Talk to a model. Every turn shows how much of the conversation was not read again.

    With --cache-dir what was read and said is kept for the next run.

    Example: [bold]kvboost chat --cache-dir ./kv[/bold]
    """
    with errors(), load_engine(model, device, dtype, cache_dir, kv_bits) as engine:
        messages = [{"role": "system", "content": system}] if system else []
        out.print("An empty line or Ctrl-D ends the conversation.", style="dim")
        while line := _ask():
            messages.append({"role": "user", "content": line})
            stream = engine.stream(
                messages, max_new_tokens, mode, temperature=temperature, seed=seed
            )
            for piece in stream:
                print(piece, end="", flush=True)
            print()
            out.print(summary(stream.result), style="dim")
            messages.append({"role": "assistant", "content": stream.result.output_text})


@models_app.callback()
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models that load by name."""
    if context.invoked_subcommand is not None:
        return
    with errors():
        from kvboost import list_models

        known = list_models()
    if as_json:
        print_json([vars(info) for info in known])
        return
    table = Table(title="models that load by name")
    for heading in ("name", "here", "what", "license"):
        table.add_column(heading)
    for info in known:
        here = "yes" if info.installed else f"kvboost models pull {info.name}"
        table.add_row(info.name, here, info.description, info.license)
    out.print(table)
    out.print(f"They are kept in {home() / 'models'}.", style="dim", highlight=False)


@models_app.command()
def pull(name: Annotated[str, typer.Argument(help="A bundled name.")]) -> None:
    """Fetch a bundled model, verify it and convert it."""
    with errors():
        from kvboost import pull_model

        out.print(f"{name} is in {pull_model(name)}", highlight=False)


@app.command()
def doctor(
    model: Model = DEFAULT_MODEL,
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Versions, device, dtype, cache folder, and what would be slow and why. Loads nothing."""
    with errors():
        from kvboost.checks.doctor import examine

        findings = examine(model, device, dtype)
    if as_json:
        print_json({"facts": findings.facts, "advice": findings.advice})
        return
    table = Table(show_header=False)
    for name, value in findings.facts.items():
        table.add_row(name, str(value))
    out.print(table)
    for advice in findings.advice:
        out.print(f"! {advice}", style="yellow", highlight=False)
    if not findings.advice:
        out.print("Nothing here should be slow.", style="green")


app.command("quality", help=BENCHMARKS["quality"].question, context_settings=bench.PASS_ON)(
    bench.forward("quality")
)


def _ask() -> str:
    try:
        return out.input("[bold]you:[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""
