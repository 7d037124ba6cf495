"""The main job in about a minute: a growing chat, a code file asked about three times, and the
same documents in three orders."""

from __future__ import annotations

import inspect
import sched
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.bench.questions import make_questions
from kvboost.bench.report import legend, prompt_map
from kvboost.results import kl_divergence

SYSTEM = (
    "You are a patient cooking teacher. Answer in two or three short sentences. Prefer simple "
    "tools and ingredients that any corner shop has. When a question is about safety, say so "
    "first. Never recommend a brand. If you do not know something, say that you do not know it."
)
TURNS = (
    "How do I cook rice so that it does not stick?",
    "And how much water do I need for two cups of brown rice?",
    "Can I keep what is left over for tomorrow?",
    "What could I cook with it then?",
)
CODE_QUESTIONS = (
    "What does the method run of this class do? Answer in one sentence.",
    "Which argument of enterabs decides between two events of the same time?",
    "What does the method cancel do with an event that is not in the queue?",
)


@dataclass(frozen=True)
class Asked:
    """One prompt answered without and with reuse."""

    title: str
    baseline: GenerationResult
    reuse: GenerationResult
    mean_kl: float | None = None
    """Of moved reuse: how far its distributions lie from a full prefill's, over the answer."""

    @property
    def same(self) -> bool:
        return self.baseline.token_ids == self.reuse.token_ids


Ask = Callable[[str, list[dict[str, str]]], Asked]


def chat(ask: Ask) -> Iterator[Asked]:
    messages = [{"role": "system", "content": SYSTEM}]
    for number, turn in enumerate(TURNS, start=1):
        messages.append({"role": "user", "content": turn})
        asked = ask(f"chat, turn {number}", messages)
        messages.append({"role": "assistant", "content": asked.reuse.output_text})
        yield asked


def code(ask: Ask) -> Iterator[Asked]:
    source = inspect.getsource(sched)
    for number, question in enumerate(CODE_QUESTIONS, start=1):
        content = f"Here is a Python file.\n\n{source}\n\n{question}"
        yield ask(f"code, question {number}", [{"role": "user", "content": content}])


def documents(engine: KVBoost, max_new_tokens: int, salt: str) -> Iterator[Asked]:
    """The same documents in three orders, none of them the one they were read in."""
    asked = make_questions(1, seed=7, num_passages=5, words_per_passage=170)[0]
    texts = [f"{text}\n\n" for text in asked.passages]
    for text in texts:
        engine.warm(text, cache_salt=salt)
    for number, order in enumerate(([3, 0, 4, 1, 2], [1, 4, 2, 3, 0], [4, 2, 0, 1, 3]), start=1):
        content = "".join(texts[place] for place in order) + asked.question
        prompt = [{"role": "user", "content": content}]
        baseline = engine.generate(prompt, max_new_tokens, GenerationMode.BASELINE)
        reuse = engine.generate(prompt, max_new_tokens, cache_salt=salt, keep=False)
        full, moved = (
            engine.score(prompt, baseline.token_ids, mode, cache_salt=salt).logits
            for mode in (GenerationMode.BASELINE, GenerationMode.CHUNK_KV_REUSE)
        )
        divergence = float(kl_divergence(full, moved).mean())
        yield Asked(f"order {number}", baseline, reuse, divergence)


def run(engine: KVBoost, console: Console, max_new_tokens: int = 24) -> list[Asked]:
    """Asks everything, shows a line per prompt as it comes, then what it adds up to."""
    salt = "demo"

    def ask(title: str, prompt: list[dict[str, str]]) -> Asked:
        baseline = engine.generate(prompt, max_new_tokens, GenerationMode.BASELINE)
        reuse = engine.generate(
            prompt, max_new_tokens, GenerationMode.PREFIX_CACHE, cache_salt=salt
        )
        return Asked(title, baseline, reuse)

    engine.generate("Warm up.", 2, GenerationMode.BASELINE)
    exact: list[Asked] = []
    moved: list[Asked] = []
    with console.status("asking") as status:
        for everything, part in (
            (exact, chat(ask)),
            (exact, code(ask)),
            (moved, documents(engine, max_new_tokens, salt)),
        ):
            for asked in part:
                everything.append(asked)
                status.update(f"asking: {asked.title} done")
    engine.forget_salt(salt)
    show_exact(exact, console)
    show_moved(moved, console)
    return [*exact, *moved]


def show_exact(everything: list[Asked], console: Console) -> None:
    table = _table("what a prompt begins with is not read again", "same")
    for asked in everything:
        table.add_row(*_cells(asked), "yes" if asked.same else "no")
    console.print(table)
    _maps(everything, console)
    console.print(f"\nasked last: {CODE_QUESTIONS[-1]}", highlight=False)
    answer = everything[-1].reuse.output_text  # the model's words, not our markup
    console.print(f"answer:     {answer}", highlight=False, markup=False)
    same = sum(asked.same for asked in everything)
    verdict = f"\n{same} of {len(everything)} answers, compared token by token, are identical."
    if same < len(everything):
        verdict += " In 16-bit arithmetic near-ties may fall either way; float32 shows equality."
    console.print(verdict, style="bold", highlight=False)


def show_moved(everything: list[Asked], console: Console) -> None:
    console.print()
    table = _table("five documents, read once each, in three orders", "again", "KL")
    for asked in everything:
        again = asked.reuse.recomputed_tokens / max(1, asked.reuse.moved_tokens)
        table.add_row(*_cells(asked), f"{again:.0%}", f"{asked.mean_kl:.4f}")
    console.print(table)
    _maps(everything, console)
    console.print(
        "\nagain: the share of moved rows that was computed again. KL: how far the answer's "
        "distributions lie from those of a full prefill, measured just now; [bold]kvboost "
        "quality[/bold] measures it on your text.",
        highlight=False,
    )


def _table(title: str, *extra: str) -> Table:
    table = Table(title=f"time to first token: {title}")
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "reused", "baseline", "reuse", "faster", *extra):
        table.add_column(heading, justify="right")
    return table


def _cells(asked: Asked) -> list[str]:
    return [
        asked.title,
        f"{asked.reuse.prompt_tokens:,}",
        f"{asked.reuse.kv_reuse_ratio:.0%}",
        f"{asked.baseline.ttft_ms:.0f} ms",
        f"{asked.reuse.ttft_ms:.0f} ms",
        f"{asked.baseline.ttft_ms / asked.reuse.ttft_ms:.1f} ×",
    ]


def _maps(everything: list[Asked], console: Console) -> None:
    console.print("\nwhere each prompt came from, first token to last:")
    width = max(len(asked.title) for asked in everything)
    for asked in everything:
        console.print(f"  {asked.title:<{width}} ", prompt_map(asked.reuse.reuse), end="\n")
    console.print(Padding(legend([asked.reuse.reuse for asked in everything]), (0, 0, 0, 2)))
