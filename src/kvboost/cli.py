"""The ``kvboost`` command. Thin: it parses, calls public names and prints."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvboost.config import DEFAULT_MODEL, home
from kvboost.errors import KVBoostError

app = typer.Typer(
    name="kvboost",
    help="A language model should never read the same text twice.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
models_app = typer.Typer(help="Models that load by name.", invoke_without_command=True)
bench_app = typer.Typer(help="Measure it yourself.", no_args_is_help=True)
app.add_typer(models_app, name="models")
app.add_typer(bench_app, name="bench")

Model = Annotated[
    str,
    typer.Option("--model", "-m", help="A bundled name, a folder, a .gguf file or a hub id."),
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda or mps; found by itself if not given.")]
Dtype = Annotated[
    str | None, typer.Option(help="float32, bfloat16 or float16; what the device does well.")
]
Mode = Annotated[
    str, typer.Option(help="baseline (no reuse), prefix_cache (exact) or chunk_kv_reuse.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 takes the likeliest token; above, tokens are drawn.")
]
MaxNewTokens = Annotated[int, typer.Option(help="The longest answer, in tokens.")]

out = Console()


@contextmanager
def _errors() -> Iterator[None]:
    """Our errors as one line and exit code 2; anything else is a bug and keeps its traceback."""
    try:
        yield
    except KVBoostError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def _engine(model: str, device: str | None, dtype: str | None) -> Any:
    """An engine, with a word about what takes time: first torch, then the weights."""
    with Console(stderr=True).status(f"loading {model}") as status:
        import kvboost

        if any(info.name == model and not info.installed for info in kvboost.list_models()):
            status.stop()  # its own progress follows
        return kvboost.KVBoost.from_pretrained(model, device=device, dtype=dtype)


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
    with _errors(), _engine(model, device, dtype) as engine:
        from kvboost.bench import demo as demonstration

        asked = demonstration.run(engine, Console(stderr=True) if as_json else out)
    if as_json:
        _print_json(
            [
                {
                    "prompt": one.title,
                    "baseline": _result(one.baseline),
                    "reuse": _result(one.reuse),
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
    device: Device = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming.

    A new process begins with an empty cache: use [bold]kvboost chat[/bold] to see reuse.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    with _errors(), _engine(model, device, dtype) as engine:
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
            _print_json(_result(stream.result))
        else:
            print()
            out.print(_summary(stream.result), style="dim")


@app.command()
def chat(
    model: Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="What the assistant should be.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes drawing repeatable.")] = None,
    mode: Mode = "chunk_kv_reuse",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Talk to a model. Every turn shows how much of the conversation was not read again."""
    with _errors(), _engine(model, device, dtype) as engine:
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
            out.print(_summary(stream.result), style="dim")
            messages.append({"role": "assistant", "content": stream.result.output_text})


@models_app.callback()
def models(context: typer.Context, as_json: AsJson = False) -> None:
    """List the models that load by name."""
    if context.invoked_subcommand is not None:
        return
    with _errors():
        from kvboost import list_models

        known = list_models()
    if as_json:
        _print_json([vars(info) for info in known])
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
    with _errors():
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
    with _errors():
        from kvboost.doctor import examine

        findings = examine(model, device, dtype)
    if as_json:
        _print_json({"facts": findings.facts, "advice": findings.advice})
        return
    table = Table(show_header=False)
    for name, value in findings.facts.items():
        table.add_row(name, str(value))
    out.print(table)
    for advice in findings.advice:
        out.print(f"! {advice}", style="yellow", highlight=False)
    if not findings.advice:
        out.print("Nothing here should be slow.", style="green")


@app.command()
def quality(
    dataset: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines with question, answers and passages; made-up questions if not given."
        ),
    ] = None,
    model: Model = DEFAULT_MODEL,
    strategy: Annotated[
        list[str] | None,
        typer.Option(help="auto, query, cacheblend, selective, none; all but query if not given."),
    ] = None,
    ratio: Annotated[
        list[float] | None,
        typer.Option(help="Share of moved rows to recompute; 0.15 if not given."),
    ] = None,
    donor: Annotated[
        list[str] | None,
        typer.Option(help="How passages were read before: alone, header, other, reordered; all."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of every file.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Passages in a prompt.")] = 8,
    passage_tokens: Annotated[int, typer.Option(min=64, help="The most tokens of one.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 16,
    floor: Annotated[
        bool, typer.Option(help="Also the deviation of the same model in another dtype.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw KL against charged share: a .png or .svg file.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Keep every row, as JSON lines.")] = None,
    load: Annotated[
        list[Path] | None, typer.Option(help="Show rows that were saved instead of measuring.")
    ] = None,
    part: Annotated[str, typer.Option(help="2/3: every third question, from the second.")] = "1/1",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """What moved reuse gives up, against full prefill; JSON on the last line.

    Every question's passages are read before in several ways (donor kinds), then served in a new
    prompt by each strategy. KL is over the full model's own answer, token by token; charged is
    what repair cost per moved token, probes included.
    """
    with _errors():
        from kvboost.bench.quality import DONORS, Setting
        from kvboost.bench.run import run_quality

        report = run_quality(
            model,
            [str(path) for path in dataset or ()],
            strategy or ["auto", "cacheblend", "selective", "none"],
            ratio or [0.15],
            donor or list(DONORS),
            Setting(passages, passage_tokens, answer_tokens),
            out,
            limit=limit,
            part=part,
            floor=floor,
            plot=str(plot) if plot else None,
            save=str(save) if save else None,
            load=[str(path) for path in load or ()],
            device=device,
            dtype=dtype,
        )
    print(json.dumps(report))


@bench_app.command()
def ttft(
    model: Model = DEFAULT_MODEL,
    pattern: Annotated[
        list[str] | None, typer.Option(help="chat, code, system, rag, fewshot; all if not given.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Prompt lengths; 512, 1024 and 2048 if not given.")
    ] = None,
    new: Annotated[int, typer.Option(min=1, help="How many of them are new.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 7,
    quick: Annotated[bool, typer.Option(help="One pattern, short prompts: half a minute.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Time to first token against stock transformers, interleaved; JSON on the last line."""
    with _errors():
        from kvboost.bench.run import run_ttft

        patterns = pattern or (["code"] if quick else None)
        lengths = tokens or ([256, 512] if quick else [512, 1024, 2048])
        report = run_ttft(
            model, patterns, lengths, new, 3 if quick else rounds, out, device=device, dtype=dtype
        )
    print(json.dumps(report))


@bench_app.command()
def moved(
    model: Model = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 7,
    conversations: Annotated[int, typer.Option(min=1, help="Of five turns each.")] = 3,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Eight moved passages against stock's full prefill; conversations that began with moved
    text; JSON on the last line."""
    with _errors():
        from kvboost.bench.run import run_moved

        report = run_moved(model, rounds, conversations, out, device=device, dtype=dtype)
    print(json.dumps(report))


@bench_app.command()
def arrange(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, help="How many requests are sent.")] = 150,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Exact reuse on requests that draw 5 of 50 documents by a Zipf law, as given and arranged;
    JSON on the last line."""
    with _errors():
        from kvboost.bench.run import run_arranged

        report = run_arranged(model, requests, out, device=device, dtype=dtype)
    print(json.dumps(report))


def _ask() -> str:
    try:
        return out.input("[bold]you:[/bold] ").strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return ""


def _summary(result: Any) -> str:
    return (
        f"[{result.prompt_tokens:,} prompt tokens, {result.kv_reuse_ratio:.0%} not read again; "
        f"first token after {result.ttft_ms:.0f} ms; {len(result.token_ids)} tokens in "
        f"{result.total_ms / 1e3:.1f} s; {result.finish_reason}]"
    ).replace("[", "\\[", 1)


def _result(result: Any) -> dict[str, Any]:
    return {
        "output_text": result.output_text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "exact_tokens": result.exact_tokens,
        "approximate_tokens": result.approximate_tokens,
        "moved_tokens": result.moved_tokens,
        "recomputed_tokens": result.recomputed_tokens,
        "charged_tokens": result.reuse.charged_tokens,
        "kv_reuse_ratio": result.kv_reuse_ratio,
        "timings": vars(result.timings),
        "spans": [
            {"kind": span.kind.value, "start": span.start, "end": span.end} for span in result.spans
        ],
    }


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
