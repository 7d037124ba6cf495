"""The main job in about a minute: a growing chat and a code file asked about three times."""

from __future__ import annotations

import inspect
import sched
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kvboost import GenerationMode, GenerationResult, KVBoost
from kvboost.bench.report import legend, prompt_map

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
    everything: list[Asked] = []
    with console.status("asking") as status:
        for part in (chat, code):
            for asked in part(ask):
                everything.append(asked)
                status.update(f"asking: {asked.title} done")
    engine.forget_salt(salt)
    show(everything, console)
    return everything


def show(everything: list[Asked], console: Console) -> None:
    table = Table(title="time to first token, every prompt answered without and with reuse")
    table.add_column("prompt", no_wrap=True)
    table.add_column("tokens", justify="right")
    table.add_column("reused", justify="right")
    table.add_column("baseline", justify="right")
    table.add_column("reuse", justify="right")
    table.add_column("faster", justify="right")
    table.add_column("same")
    for asked in everything:
        table.add_row(
            asked.title,
            f"{asked.reuse.prompt_tokens:,}",
            f"{asked.reuse.kv_reuse_ratio:.0%}",
            f"{asked.baseline.ttft_ms:.0f} ms",
            f"{asked.reuse.ttft_ms:.0f} ms",
            f"{asked.baseline.ttft_ms / asked.reuse.ttft_ms:.1f} ×",
            "yes" if asked.same else "no",
        )
    console.print(table)
    console.print("\nwhere each prompt came from, first token to last:")
    width = max(len(asked.title) for asked in everything)
    for asked in everything:
        console.print(f"  {asked.title:<{width}} ", prompt_map(asked.reuse.reuse), end="\n")
    console.print("  ", legend())
    console.print(f"\nasked last: {CODE_QUESTIONS[-1]}", highlight=False)
    answer = everything[-1].reuse.output_text  # the model's words, not our markup
    console.print(f"answer:     {answer}", highlight=False, markup=False)
    same = sum(asked.same for asked in everything)
    verdict = f"\n{same} of {len(everything)} answers, compared token by token, are identical."
    if same < len(everything):
        verdict += " In 16-bit arithmetic near-ties may fall either way; float32 shows equality."
    console.print(verdict, style="bold", highlight=False)
