"""``kvboost bench``: measure it yourself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvboost.cli import bench_studies
from kvboost.cli.common import Dataset, Device, Donor, Dtype, KVBits, Model, errors, out
from kvboost.config import DEFAULT_MODEL, bound_kernel_caches
from kvboost.errors import ConfigError

app = typer.Typer(help="Measure it yourself.", no_args_is_help=True)
bench_studies.register(app)

Peers = Annotated[
    bool, typer.Option("--peers", help="Also every other engine that make peers has set up.")
]
OnePeer = Annotated[
    list[str] | None,
    typer.Option(
        help="Only these of them: stock, kvboost, kvboost-prefix, kvboost-0.9.0, vllm, llama.cpp, "
        "openvino."
    ),
]
Plot = Annotated[Path | None, typer.Option(help="Draw it: a .png or .svg file.")]


@app.command()
def ttft(
    model: Model = DEFAULT_MODEL,
    pattern: Annotated[
        list[str] | None, typer.Option(help="chat, code, system, rag, fewshot; all if not given.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(help="Prompt lengths; 512, 1024 and 2048 if not given.")
    ] = None,
    words: Annotated[
        list[int] | None, typer.Option(help="Lengths for the break-even; 100 to 8,000.")
    ] = None,
    new: Annotated[int, typer.Option(min=1, help="How many of them are new.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 7,
    turns: Annotated[int | None, typer.Option(min=2, max=50, help="Of a conversation; 10.")] = None,
    peers: Peers = False,
    peer: OnePeer = None,
    plot: Plot = None,
    quick: Annotated[bool, typer.Option(help="One pattern, short prompts: a minute.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Time to first token against stock transformers, interleaved; JSON on the last line.

    Five patterns, prompts from short to long, a conversation turn by turn, one decode step. With
    --peers also other engines, each in its own environment (make peers), cold and warm.

    Example: kvboost bench ttft --peers --plot ttft.png
    """
    with errors():
        from kvboost.bench.ttft.run import Plan, run_ttft

        usual = Plan(model)
        if quick:
            usual = Plan(
                model,
                patterns=("code",),
                tokens=(256, 512),
                words=(100, 400),
                rounds=3,
                turns=8,
                conversations=1,
                opening_tokens=256,
                peer_tokens=(512,),
            )
        plan = replace(
            usual,
            patterns=tuple(pattern or usual.patterns),
            tokens=tuple(tokens or usual.tokens),
            words=tuple(words or usual.words),
            num_new=new,
            rounds=usual.rounds if quick else rounds,
            turns=turns or usual.turns,
            engines=_engines(peers, peer),
        )
        report = run_ttft(plan, out, plot=str(plot) if plot else None, device=device, dtype=dtype)
    print(json.dumps(report))


@app.command()
def interior(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of a prompt, about; 2048 if not given.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=50, help="Medians are over this many; 5.")
    ] = None,
    peer: OnePeer = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Of one engine: then it is not asked in later rounds.")
    ] = 240.0,
    plot: Plot = None,
    quick: Annotated[
        bool, typer.Option(help="Ours and stock transformers, short prompts: under a minute.")
    ] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Known documents at the front, in the middle, twice, reordered, behind a changing header: what
    every engine reuses of them, and how long until the first token; JSON on the last line.

    Engines run in their own environments (make peers); one that is missing is said to be.

    Example: kvboost bench interior --peer kvboost --peer vllm --plot interior.png
    """
    with errors():
        from kvboost.bench.interior.run import Plan, run_interior
        from kvboost.bench.peers.engines import OWN

        usual = Plan(model, OWN, 768, 2) if quick else Plan(model)
        plan = Plan(
            model,
            tuple(peer or usual.engines),
            tokens or usual.tokens,
            rounds or usual.rounds,
            seconds,
        )
        report = run_interior(
            plan, out, plot=str(plot) if plot else None, device=device, dtype=dtype
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
    with 1 if something was wrong. JSON on the last line."""
    bound_kernel_caches()
    with errors():
        from kvboost.bench.soak import run_soak

        report = run_soak(model, minutes, out, device=device, dtype=dtype)
    print(json.dumps(report))
    if report["problems"]:
        raise typer.Exit(1)


@app.command()
def batch(
    model: Model = DEFAULT_MODEL,
    tokens: Annotated[int, typer.Option(min=256, help="Of the shared document.")] = 4096,
    requests: Annotated[int, typer.Option(min=2, max=64, help="At once.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, max=50, help="Medians are over this many.")] = 5,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Answers at once against one after the other, and questions about one document with its KV
    held once; JSON on the last line."""
    with errors():
        from kvboost.bench.batch import run_batch

        report = run_batch(model, tokens, requests, rounds, out, device=device, dtype=dtype)
    print(json.dumps(report))


@app.command()
def storm(
    model: Model = DEFAULT_MODEL,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 10.0,
) -> None:
    """Our server at twice the rate it can sustain, with clients that hang up, send nonsense, too
    much or too slowly: answers, memory and leaks are watched. Ends with 1 if something was wrong.
    JSON on the last line."""
    with errors(), _extra("storm"):
        from kvboost.bench.storm import run_storm

        report = run_storm(model, minutes, out)
    print(json.dumps(report))
    if report["problems"]:
        raise typer.Exit(1)


@app.command()
def serve(
    model: Model = DEFAULT_MODEL,
    system: Annotated[
        list[str] | None,
        typer.Option(help="kvboost, kvboost-baseline, vllm, llama.cpp; all if not given."),
    ] = None,
    workload: Annotated[
        list[str] | None, typer.Option(help="rag, chat, mixed; all if not given.")
    ] = None,
    users: Annotated[int | None, typer.Option(min=1, help="At once; 8 if not given.")] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Of each user; 4 if not given.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of every answer; 32 if not given.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, max=50, help="Medians are over this many; 3.")
    ] = None,
    loop: Annotated[
        str,
        typer.Option(help="closed: a user waits for the answer; open: arrivals by chance; both."),
    ] = "closed",
    rate: Annotated[float | None, typer.Option(help="Open loop: requests per second.")] = None,
    load: Annotated[
        float, typer.Option(help="Without a rate: this share of what vllm reached when closed.")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Of what users send, and when.")] = 0,
    seconds: Annotated[
        float, typer.Option(help="Of one load: nothing is sent later, so that the slow end too.")
    ] = 120.0,
    quick: Annotated[bool, typer.Option(help="Ours only, rag, one short round.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw it: a .png or .svg file.")] = None,
    save: Annotated[
        Path | None, typer.Option("--json", help="Also write the result to this file.")
    ] = None,
) -> None:
    """Our server against vLLM and llama.cpp over HTTP, one at a time, with the same requests.

    The others come from scripts/setup_peers.py; one that is missing is said to be. JSON on the
    last line.

    Example: kvboost bench serve --workload rag --rounds 1 --plot serve.png
    """
    with errors(), _extra("serve"):
        from kvboost.bench.serve import Plan, run_serve

        short = Plan(model, ("kvboost", "kvboost-baseline"), ("rag",), 4, 2, 16, 1)
        usual = short if quick else Plan(model)
        plan = Plan(
            model,
            tuple(system or usual.systems),
            tuple(workload or usual.workloads),
            users or usual.users,
            requests or usual.requests,
            max_tokens or usual.max_tokens,
            rounds or usual.rounds,
            loop,
            rate,
            load,
            seed,
            seconds,
        )
        report = run_serve(
            plan, out, plot=str(plot) if plot else None, save=str(save) if save else None
        )
    print(json.dumps(report))


def _engines(every: bool, some: list[str] | None) -> tuple[str, ...]:
    """Behind the pipe: those named, or all if they are wanted."""
    from kvboost.bench.peers.engines import ENGINES

    return tuple(some or (ENGINES if every else ()))


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Says what to install where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"kvboost bench {name} needs {error.name}; install it with: "
            "pip install 'kvboost[bench]'"
        ) from None
