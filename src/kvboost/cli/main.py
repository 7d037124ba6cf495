"""The ``kvboost`` command: its own commands and its groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

import kvboost
from kvboost.bench.benchmarks import BENCHMARKS
from kvboost.cli import bench, cache, common, explain, models, route, serve, vllm
from kvboost.cli.chat import Conversation, ask_in_terminal, edit_lines
from kvboost.cli.common import load_engine
from kvboost.config import DEFAULT_MODEL

app = typer.Typer(
    name="kvboost", no_args_is_help=True, add_completion=False, rich_markup_mode="rich"
)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.add_typer(vllm.app, name="vllm")
app.command()(serve.serve)
app.command()(route.route)
app.command()(explain.explain)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"kvboost {kvboost.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, common.told("Show the version.", "--version", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """A language model should never read the same text twice."""


@app.command()
def demo(
    model: common.Model = DEFAULT_MODEL,
    device: common.Device = None,
    dtype: common.Dtype = "float32",
    quick: Annotated[bool, common.told("Ask half of the prompts.", "--quick")] = False,
    as_json: common.AsJson = False,
) -> None:
    """Compare answers and times without and with reuse.

    Asks a growing chat, three questions about a code file, and questions over documents in three
    orders. It runs in float32, so that answers can be compared token by token; --dtype bfloat16
    is faster.
    """
    with (
        common.errors(),
        load_engine(model, common.Loading(device=device, dtype=dtype)) as engine,
    ):
        from kvboost.cli import demo as demonstration

        console = Console(stderr=True) if as_json else common.out
        asked = demonstration.run(engine, console, quick=quick)
    if as_json:
        common.print_json(
            [
                {
                    "prompt": one.title,
                    "baseline": common.describe(one.baseline),
                    "reuse": common.describe(one.reuse),
                    "same": one.same,
                    "mean_kl": one.mean_kl,
                }
                for one in asked
            ]
        )


@app.command()
@common.expanded
def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The question; - reads standard input.")
    ],
    model: common.Model = DEFAULT_MODEL,
    max_new_tokens: common.MaxNewTokens = 64,
    temperature: common.Temperature = 0.0,
    seed: common.Seed = None,
    stop: Annotated[
        list[str] | None, common.told("End the answer before this text; may be repeated.")
    ] = None,
    chat: Annotated[
        bool, common.told("Ask in the model's chat template; --no-chat continues the text.")
    ] = True,
    schema: Annotated[
        Path | None,
        common.told("Answer in JSON that keeps to the JSON schema in FILE.", metavar="FILE"),
    ] = None,
    regex: Annotated[
        str | None, common.told("Answer with text that this regular expression matches.")
    ] = None,
    *,
    how: common.Answering,
    loading: common.Loading,
    as_json: common.AsJson = False,
) -> None:
    """Answer one prompt.

    Every run begins with an empty cache, unless --cache-dir names a folder that keeps it.

    Example: [bold]kvboost generate - --cache-dir ./kv < report.txt[/bold]
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with common.errors():
        options = how.checked(max_new_tokens)
        options |= {"schema": common.read_schema(schema) if schema else None, "regex": regex}
        options |= {"temperature": temperature, "seed": seed, "stop": stop}
    with common.errors(), load_engine(model, loading) as engine:
        stream = engine.stream(
            [{"role": "user", "content": text}] if chat else text,
            max_new_tokens,
            how.mode,
            **options,
        )
        for piece in stream:
            if not as_json:
                print(piece, end="", flush=True)
        if as_json:
            common.print_json(common.describe(stream.result))
        else:
            print()
            common.out.print(common.summary(stream.result), style="dim")


@app.command()
@common.expanded
def chat(
    model: common.Model = DEFAULT_MODEL,
    system: Annotated[str | None, common.told("The system prompt.")] = None,
    max_new_tokens: common.MaxNewTokens = 256,
    temperature: common.Temperature = 0.0,
    seed: common.Seed = None,
    *,
    how: common.Answering,
    loading: common.Loading,
    device_memory: common.DeviceMemory = None,
    host_memory: common.HostMemory = None,
) -> None:
    """Talk to a model; every answer shows how much of the conversation was reused.

    /help lists what can be typed besides questions. Ctrl-C stops an answer. With --cache-dir the
    next run reuses this conversation.

    Example: [bold]kvboost chat --cache-dir ./kv[/bold]
    """
    with common.errors():
        options = how.checked(max_new_tokens) | {"temperature": temperature, "seed": seed}
    memory = {"device_memory": device_memory, "host_memory": host_memory}
    with common.errors(), load_engine(model, loading, **memory) as engine:
        edit_lines()
        Conversation(engine, common.out, system, max_new_tokens, how.mode, options).run(
            ask_in_terminal
        )


@app.command()
def doctor(
    model: common.Model = DEFAULT_MODEL,
    device: common.Device = None,
    dtype: common.Dtype = None,
    vllm: Annotated[
        bool, common.told("Show instead whether vLLM can use KVBoost here.", "--vllm")
    ] = False,
    as_json: common.AsJson = False,
) -> None:
    """Show what this machine has and what would be slow on it.

    Versions, device, dtype, kernels and folders. Loads no model and downloads nothing. With --vllm
    it imports vLLM, which takes some seconds, and ends with status 1 if vLLM cannot use KVBoost.
    """
    if vllm:
        _examine_vllm(as_json)
        return
    with common.errors():
        from kvboost.checks.doctor import examine

        findings = examine(model, device, dtype)
    if as_json:
        common.print_json({"facts": findings.facts, "advice": findings.advice})
        return
    _show(findings.facts, findings.advice)
    if not findings.advice:
        common.out.print("Nothing here makes KVBoost slow.", style="green")


def _examine_vllm(as_json: bool) -> None:
    from kvboost.integrations.vllm.environment import examine

    found = examine()
    if as_json:
        common.print_json(vars(found))
    elif found.problem is not None:
        common.out.print(found.problem, highlight=False, markup=False)
    else:
        _show(found.facts, found.advice)
        common.out.print("Start vLLM with KVBoost (docs/vllm.md):")
        print(found.command)
    if found.problem is not None:
        raise typer.Exit(1)


def _show(facts: Mapping[str, object], advice: Sequence[str]) -> None:
    table = Table(show_header=False)
    for name, value in facts.items():
        shown = ("no", "yes")[value] if isinstance(value, bool) else str(value)
        table.add_row(name, shown)
    common.out.print(table)
    for one in advice:
        common.out.print(f"! {one}", style="yellow", highlight=False)


app.command("quality", help=BENCHMARKS["quality"].question, context_settings=bench.PASS_ON)(
    bench.forward(BENCHMARKS["quality"])
)
common.unwrap_help(app)
