"""``kvboost bench``: measure it yourself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli.common import Dataset, Device, Donor, Dtype, KVBits, Model, errors, out
from kvboost.config import DEFAULT_MODEL

app = typer.Typer(help="Measure it yourself.", no_args_is_help=True)


@app.command()
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
    with errors():
        from kvboost.bench.run import run_ttft

        patterns = pattern or (["code"] if quick else None)
        lengths = tokens or ([256, 512] if quick else [512, 1024, 2048])
        report = run_ttft(
            model, patterns, lengths, new, 3 if quick else rounds, out, device=device, dtype=dtype
        )
    print(json.dumps(report))


@app.command()
def moved(
    model: Model = DEFAULT_MODEL,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 7,
    conversations: Annotated[int, typer.Option(min=1, help="Of five turns each.")] = 3,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Eight moved passages against stock's full prefill; conversations that began with moved
    text; JSON on the last line."""
    with errors():
        from kvboost.bench.run import run_moved

        report = run_moved(model, rounds, conversations, out, device=device, dtype=dtype)
    print(json.dumps(report))


@app.command()
def arrange(
    model: Model = DEFAULT_MODEL,
    requests: Annotated[int, typer.Option(min=1, help="How many requests are sent.")] = 150,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Exact reuse on requests that draw 5 of 50 documents by a Zipf law, as given and arranged;
    JSON on the last line."""
    with errors():
        from kvboost.bench.run import run_arranged

        report = run_arranged(model, requests, out, device=device, dtype=dtype)
    print(json.dumps(report))


@app.command()
def traffic(
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Also a real trace: JSON lines with hash_ids, the blocks of a prompt."),
    ] = None,
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Cache sizes in blocks, for the traces.")
    ] = None,
    requests: Annotated[int, typer.Option(min=10, help="Of every made-up traffic.")] = 2_000,
    plot: Annotated[
        Path | None, typer.Option(help="Draw hit rate against size: a .png or .svg file.")
    ] = None,
) -> None:
    """Who goes first when the cache is full: ours against LRU, FIFO, LFU and Belady's optimum.

    Replays made-up traffic (uniform, Zipf, conversations) and real traces without a model. A block
    counts as a hit only if all before it hit. JSON on the last line.

    Example: kvboost bench traffic --trace conversation.jsonl --size 1000 --size 10000 --plot t.png
    """
    with errors():
        from kvboost.bench.run import run_traffic

        report = run_traffic(
            [str(path) for path in trace or ()],
            size,
            requests,
            out,
            plot=str(plot) if plot else None,
        )
    print(json.dumps(report))


@app.command()
def tiers(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=256, help="Of the text that is kept.")] = 4096,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 7,
    scanned: Annotated[
        int, typer.Option(min=1, help="Chunks in the folder to start over.")
    ] = 10_000,
    dtype: Dtype = None,
) -> None:
    """What bringing chunks up from RAM and disk costs, packing them in 8 and 4 bits, and a start
    over a full folder; JSON on the last line."""
    with errors():
        from kvboost.bench.tiers import run_tiers

        report = run_tiers(model, tokens, rounds, out, scanned=scanned, dtype=dtype)
    print(json.dumps(report))


@app.command()
def bits(
    dataset: Dataset = None,
    model: Model = DEFAULT_MODEL,
    donor: Donor = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Questions of every file.")] = None,
    passages: Annotated[int, typer.Option(min=2, help="Passages in a prompt.")] = 8,
    passage_tokens: Annotated[int, typer.Option(min=64, help="The most tokens of one.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of an answer.")] = 16,
    part: Annotated[str, typer.Option(help="2/3: every third question, from the second.")] = "1/1",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """What 8 and 4 bits give up, on exact hits and on moved text, against full prefill; JSON on
    the last line."""
    with errors():
        from kvboost.bench.bits import run_bits
        from kvboost.bench.quality import Setting

        report = run_bits(
            model,
            [str(path) for path in dataset or ()],
            donor or ["header", "reordered"],
            Setting(passages, passage_tokens, answer_tokens),
            out,
            limit=limit,
            part=part,
            device=device,
            dtype=dtype,
        )
    print(json.dumps(report))


@app.command()
def restart(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=256, help="Of the document.")] = 4096,
    kv_bits: KVBits = 16,
    dtype: Dtype = None,
) -> None:
    """One process reads a document and ends; the first request of another is timed against full
    prefill. JSON on the last line."""
    with errors():
        from kvboost.bench.restart import run_restart

        report = run_restart(model, tokens, kv_bits, out, dtype=dtype)
    print(json.dumps(report))


@app.command()
def soak(
    model: Model = DEFAULT_MODEL,
    minutes: Annotated[float, typer.Option(min=0.05, help="How long.")] = 10.0,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Mixed requests over 64 chunks for minutes: memory, budgets and answers are watched. Ends
    with 1 if something was wrong. JSON on the last line.

    oneDNN's own cache, which keeps code for a thousand numbers of rows and grows for as long, is
    held to 16 meanwhile: what is watched is ours.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")  # read when torch is loaded
    with errors():
        from kvboost.bench.soak import run_soak

        report = run_soak(model, minutes, out, device=device, dtype=dtype)
    print(json.dumps(report))
    if report["problems"]:
        raise typer.Exit(1)
