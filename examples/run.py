"""Runs the examples without and with reuse, and compares times and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from kvboost import GenerationMode, GenerationResult, KVBoostError

if TYPE_CHECKING:
    from kvboost import KVBoost

    Prompt = str | list[dict[str, str]]
    Ask = Callable[[str, Prompt], str]


@dataclass(frozen=True)
class Pattern:
    title: str
    module: str
    """Imported only when it runs: it imports torch, which takes seconds, and --help should not
    wait."""


PATTERNS = {
    "chatbot": Pattern("a long system prompt shared by many users' questions", "chatbot"),
    "rag": Pattern("passages at the front, in one order, and questions over them", "rag"),
    "fewshot": Pattern("many worked examples, the new case at the end", "fewshot"),
    "multiturn": Pattern("a conversation that grows", "multiturn"),
    "code": Pattern("a source file asked about several times", "code_file"),
}

HELP = "\n\n".join(
    (
        "Asks each prompt of a pattern twice, without reuse (mode baseline) and with exact reuse "
        "(mode prefix_cache), and shows the time to the first token in both.",
        "The patterns:",
        "\n".join(f"- {name}: {pattern.title}" for name, pattern in PATTERNS.items()),
        "The first prompt of a pattern finds an empty cache and fills it. The prompts after it "
        "compute only what is new.",
        "The answers are compared token by token. In float32 they should be the same: reuse "
        "saves work and does not change the result. bfloat16 and float16 round so coarsely that "
        "two almost equally likely tokens may change places, so a different answer there proves "
        "nothing.",
        "Try: python examples/run.py chatbot",
    )
)

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
out = Console()


@dataclass(frozen=True)
class Asked:
    """One prompt answered without and with reuse."""

    title: str
    baseline: GenerationResult
    reuse: GenerationResult

    @property
    def same(self) -> bool:
        return self.baseline.token_ids == self.reuse.token_ids


def measure(engine: KVBoost, name: str, max_new_tokens: int) -> list[Asked]:
    """Asks all prompts of a pattern in both modes. The salt gives the pattern its own cache, which
    is empty at first and is forgotten at the end."""
    salt = f"example {name}"
    everything: list[Asked] = []
    ask_all: Callable[[Ask], None] = import_module(PATTERNS[name].module).ask_all
    with out.status(f"{name}: asking") as status:

        def ask(title: str, prompt: Prompt) -> str:
            baseline = engine.generate(prompt, max_new_tokens, GenerationMode.BASELINE)
            reuse = engine.generate(
                prompt, max_new_tokens, GenerationMode.PREFIX_CACHE, cache_salt=salt
            )
            everything.append(Asked(title, baseline, reuse))
            status.update(f"{name}: {len(everything)} answered")
            return reuse.output_text

        ask_all(ask)
    engine.forget_salt(salt)
    return everything


def show(name: str, everything: list[Asked], dtype: str) -> None:
    out.print(f"\n[bold]{name}[/bold]: {PATTERNS[name].title}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("prompt")
    for heading in ("tokens", "reused", "baseline", "reuse", "faster"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("same", no_wrap=True)
    for asked in everything:
        table.add_row(
            asked.title,
            f"{asked.reuse.prompt_tokens:,}",
            f"{asked.reuse.kv_reuse_ratio:.0%}",
            f"{asked.baseline.ttft_ms:,.0f} ms",
            f"{asked.reuse.ttft_ms:,.0f} ms",
            f"{asked.baseline.ttft_ms / asked.reuse.ttft_ms:.1f} ×",
            "yes" if asked.same else "no",
        )
    out.print(table)
    last = everything[-1].reuse.output_text
    out.print(f"the last answer begins: {' '.join(last.split())}", markup=False, highlight=False)
    out.print(verdict(everything, dtype), style="bold", highlight=False)


def verdict(everything: list[Asked], dtype: str) -> str:
    """Whether the answers are the same, and what it means if they are not."""
    same = sum(asked.same for asked in everything)
    text = f"{same} of {len(everything)} answers, compared token by token, are the same."
    if same == len(everything):
        return text
    if dtype == "float32":
        return (
            f"{text} In float32 only an almost perfect tie between two tokens can explain a "
            "difference; anything else is a bug in the cache. Please report it."
        )
    return (
        f"{text} In {dtype} two almost equally likely tokens may change places, because sums are "
        "rounded in another order; --dtype float32 distinguishes this from a bug in the cache."
    )


def chosen(pattern: str) -> list[str]:
    """The patterns to run; raises BadParameter, with the known names, if ``pattern`` is unknown."""
    if pattern == "all":
        return list(PATTERNS)
    if pattern not in PATTERNS:
        raise typer.BadParameter(
            f"there is no pattern {pattern!r}; choose one of {', '.join(PATTERNS)}, or all"
        )
    return [pattern]


@app.command(help=HELP, no_args_is_help=True)
def main(
    pattern: Annotated[
        str, typer.Argument(help=f"One of {', '.join(PATTERNS)}; or all.", metavar="PATTERN")
    ],
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="A model's name, a folder, a .gguf file or a hub id."),
    ] = "smollm2-135m",
    dtype: Annotated[
        str, typer.Option(help="float32, so that answers can be compared; bfloat16 or float16.")
    ] = "float32",
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="The longest answer, in tokens. More compares more.")
    ] = 24,
) -> None:
    names = chosen(pattern)
    try:
        with out.status(f"loading {model}"):
            from kvboost import KVBoost

            engine = KVBoost.from_pretrained(model, dtype=dtype)
        with engine:
            # The first call of a process is slow for reasons that are unrelated to reuse.
            engine.generate("Warm up.", 2, GenerationMode.BASELINE)
            out.print(f"{engine.model_name}, {dtype}, {engine.device}: time to the first token")
            for name in names:
                show(name, measure(engine, name, max_new_tokens), dtype)
    except KVBoostError as error:
        typer.secho(f"error: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


if __name__ == "__main__":
    app()
