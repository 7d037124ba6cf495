"""``kvboost demo``: a growing chat, a code file asked about three times, and the same documents in
other orders, each prompt without and with reuse."""

from __future__ import annotations

import inspect
import sched
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvboost import GenerationMode, GenerationResult, KVBoost, ReuseReport, SpanKind
from kvboost.bench.texts.questions import make_questions
from kvboost.results import kl_divergence
from kvboost.results.explanation import MARKS, RECOMPUTED, cells

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
ORDERS = ([3, 0, 4, 1, 2], [1, 4, 2, 3, 0], [4, 2, 0, 1, 3])
"""Of the documents; none is the order they were read in."""


@dataclass(frozen=True)
class Asked:
    """One prompt answered without and with reuse."""

    title: str
    baseline: GenerationResult
    reuse: GenerationResult
    mean_kl: float | None = None
    """With moved text: how far its distributions are from a full prefill's, over the answer."""

    @property
    def same(self) -> bool:
        return self.baseline.token_ids == self.reuse.token_ids


Ask = Callable[[str, list[dict[str, str]]], Asked]


def chat(ask: Ask, turns: Sequence[str]) -> Iterator[Asked]:
    messages = [{"role": "system", "content": SYSTEM}]
    for number, turn in enumerate(turns, start=1):
        messages.append({"role": "user", "content": turn})
        asked = ask(f"chat, turn {number}", messages)
        messages.append({"role": "assistant", "content": asked.reuse.output_text})
        yield asked


def code(ask: Ask, questions: Sequence[str]) -> Iterator[Asked]:
    source = inspect.getsource(sched)
    for number, question in enumerate(questions, start=1):
        content = f"Here is a Python file.\n\n{source}\n\n{question}"
        yield ask(f"code, question {number}", [{"role": "user", "content": content}])


def documents(
    engine: KVBoost, max_new_tokens: int, salt: str, orders: Sequence[list[int]]
) -> Iterator[Asked]:
    """The same documents in other orders than they were read in."""
    asked = make_questions(1, seed=7, num_passages=5, words_per_passage=170)[0]
    texts = [f"{text}\n\n" for text in asked.passages]
    for text in texts:
        engine.warm(text, cache_salt=salt)
    for number, order in enumerate(orders, start=1):
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


def run(
    engine: KVBoost, console: Console, max_new_tokens: int = 24, *, quick: bool = False
) -> list[Asked]:
    """Asks everything, prints a line per prompt as it is answered, then what it adds up to.
    ``quick`` asks two turns, two questions and one order."""
    salt = "demo"
    some = slice(2) if quick else slice(None)
    turns, questions, orders = TURNS[some], CODE_QUESTIONS[some], ORDERS[:1] if quick else ORDERS

    def ask(title: str, prompt: list[dict[str, str]]) -> Asked:
        baseline = engine.generate(prompt, max_new_tokens, GenerationMode.BASELINE)
        reuse = engine.generate(
            prompt, max_new_tokens, GenerationMode.PREFIX_CACHE, cache_salt=salt
        )
        return Asked(title, baseline, reuse)

    start = time.monotonic()
    total = len(turns) + len(questions) + len(orders)
    console.print(f"{total} prompts, each answered without and with reuse", highlight=False)
    engine.generate("Warm up.", 2, GenerationMode.BASELINE)
    exact: list[Asked] = []
    moved: list[Asked] = []
    with console.status("asking"):
        for everything, part in (
            (exact, chat(ask, turns)),
            (exact, code(ask, questions)),
            (moved, documents(engine, max_new_tokens, salt, orders)),
        ):
            for asked in part:
                everything.append(asked)
                _show_progress(asked, len(exact) + len(moved), total, start, console)
    engine.forget_salt(salt)
    show_exact(exact, console)
    show_moved(moved, console)
    return [*exact, *moved]


def _show_progress(asked: Asked, number: int, total: int, start: float, console: Console) -> None:
    baseline, reuse = asked.baseline.ttft_ms / 1e3, asked.reuse.ttft_ms / 1e3
    console.print(
        f"  {number:2} of {total}  {asked.title}: first token after {baseline:.2f} s without "
        f"reuse, {reuse:.2f} s with it ({time.monotonic() - start:.0f} s so far)",
        highlight=False,
        soft_wrap=True,
    )
    console.file.flush()  # a file shows each line when it is written, too


def show_exact(everything: list[Asked], console: Console) -> None:
    table = _table("the beginning of a prompt is not read again", "same")
    for asked in everything:
        table.add_row(*_cells(asked), "yes" if asked.same else "no")
    console.print(table)
    _maps(everything, console)
    asked_last = CODE_QUESTIONS[sum(asked.title.startswith("code") for asked in everything) - 1]
    console.print(f"\nasked last: {asked_last}", highlight=False)
    answer = everything[-1].reuse.output_text  # the model's words, not our markup
    console.print(f"answer:     {answer}", highlight=False, markup=False)
    same = sum(asked.same for asked in everything)
    verdict = f"\n{same} of {len(everything)} answers, compared token by token, are identical."
    if same < len(everything):
        verdict += " In 16-bit arithmetic near-ties may fall either way; float32 shows equality."
    console.print(verdict, style="bold", highlight=False)


def show_moved(everything: list[Asked], console: Console) -> None:
    console.print()
    table = _table("five documents, read once each, in other orders", "again", "KL")
    for asked in everything:
        again = asked.reuse.recomputed_tokens / max(1, asked.reuse.moved_tokens)
        table.add_row(*_cells(asked), f"{again:.0%}", f"{asked.mean_kl:.4f}")
    console.print(table)
    _maps(everything, console)
    console.print(
        "\nagain: the share of moved rows that was computed again. KL: how far the answer's "
        "distributions are from those of a full prefill, measured just now; [bold]kvboost "
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


# Kind: colour, meaning. The marks tell kinds apart without colours, too.
STYLES = {
    SpanKind.EXACT.value: ("green", "exact: read before, not computed again"),
    SpanKind.APPROXIMATE.value: ("blue", "this conversation's own past over moved text"),
    SpanKind.MOVED.value: ("cyan", "moved: read before at another place"),
    RECOMPUTED: ("magenta", "moved, a fifth or more computed again"),
    SpanKind.COMPUTE.value: ("yellow", "computed now"),
}


def prompt_map(report: ReuseReport, width: int = 48) -> Text:
    """A prompt as one bar. Each cell shows what most of its tokens are; a moved cell also shows
    whether a fifth of it or more was computed again."""
    return painted(cells(report.spans, report.recomputed, width))


def painted(map_cells: Sequence[str]) -> Text:
    """The cells of a map as one bar."""
    text = Text()
    for name in map_cells:
        text.append(MARKS[name], style=STYLES[name][0])
    return text


def legend(reports: Sequence[ReuseReport] = ()) -> Text:
    """The legend of all marks; given ``reports``, only of those that may occur in their maps."""
    kinds = {span.kind.value for report in reports for span in report.spans}
    if any(report.recomputed for report in reports):
        kinds.add(RECOMPUTED)
    return legend_of(kinds if reports else STYLES.keys())


def legend_of(kinds: Collection[str]) -> Text:
    """The legend of the marks of ``kinds``."""
    lines = [
        Text(f"{MARKS[name]} {meaning}", style=colour)
        for name, (colour, meaning) in STYLES.items()
        if name in kinds
    ]
    return Text("\n").join(lines)
