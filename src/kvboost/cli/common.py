"""Options that commands share, and how they print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvboost.config import chosen_cache_dir
from kvboost.errors import KVBoostError
from kvboost.results import GenerationResult

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

CacheDir = Annotated[
    Path | None,
    typer.Option(
        help="Keep KV in this folder, or in that of KVBOOST_CACHE_DIR: the next run does not read "
        "the same text again."
    ),
]
KVBits = Annotated[
    int, typer.Option("--kv-bits", help="As what KV is kept: 16, or smaller, 8 or 4.")
]

out = Console()


@contextmanager
def errors() -> Iterator[None]:
    """Our errors as one line and exit code 2; anything else is a bug and keeps its traceback."""
    try:
        yield
    except KVBoostError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def load_engine(
    model: str,
    device: str | None,
    dtype: str | None,
    cache_dir: Path | None = None,
    kv_bits: int = 16,
) -> Any:
    """An engine, with a word about what takes time: first torch, then the weights."""
    with Console(stderr=True).status(f"loading {model}") as status:
        import kvboost

        if any(info.name == model and not info.installed for info in kvboost.list_models()):
            status.stop()  # its own progress follows
        return kvboost.KVBoost.from_pretrained(
            model,
            device=device,
            dtype=dtype,
            disk_cache_dir=cache_dir or chosen_cache_dir(),
            kv_cache_bits=kv_bits,
        )


def summary(result: GenerationResult) -> str:
    """One line about a request; says what had to be fetched from afar."""
    rows: Counter[str] = Counter()
    for span in result.spans:
        rows[span.tier or ""] += span.num_tokens
    fetched = " and ".join(
        f"{rows[tier]:,} from {tier}" for tier in ("disk", "remote") if rows[tier]
    )
    return (
        f"[{result.prompt_tokens:,} prompt tokens, {result.kv_reuse_ratio:.0%} not read again"
        f"{fetched and f' ({fetched})'}; first token after {result.ttft_ms:.0f} ms; "
        f"{len(result.token_ids)} tokens in {result.total_ms / 1e3:.1f} s; {result.finish_reason}]"
    ).replace("[", "\\[", 1)


def describe(result: GenerationResult) -> dict[str, Any]:
    """A result for JSON."""
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
            {"kind": span.kind.value, "start": span.start, "end": span.end, "tier": span.tier}
            for span in result.spans
        ],
    }


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))
